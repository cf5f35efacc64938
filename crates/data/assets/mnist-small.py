"""Makes mnist-small: 256 and 64 of the embedded digits in MNIST's form, each pixel as 3 by 3, with a border of 2."""

import gzip
import pathlib
import struct

here = pathlib.Path(__file__).parent
rows = [[int(v) for v in line.split(",")] for line in gzip.open(here / "digits.csv.gz", "rt")]


def write(name, extents, content):
    head = struct.pack(f">HBB{len(extents)}I", 0, 8, len(extents), *extents)
    with open(here / "mnist-small" / f"{name}-idx{len(extents)}-ubyte.gz", "wb") as file:
        with gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
            packed.write(head + bytes(content))


def image(row):
    for y in range(28):
        for x in range(28):
            inside = 2 <= y < 26 and 2 <= x < 26
            yield row[(y - 2) // 3 * 8 + (x - 2) // 3] * 255 // 16 if inside else 0


for name, part in [("train", rows[:256]), ("t10k", rows[256:320])]:
    write(f"{name}-images", [len(part), 28, 28], [pixel for row in part for pixel in image(row)])
    write(f"{name}-labels", [len(part)], [row[64] for row in part])
