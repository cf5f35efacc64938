"""Prints the golden values of tests/images.rs: `F.interpolate` with antialiasing, by PyTorch."""

import torch
import torch.nn.functional as F

x = torch.tensor([float(i * i % 17) for i in range(35)]).reshape(1, 1, 5, 7)
for height, width in [(2, 3), (3, 10), (9, 4), (5, 13), (1, 1)]:
    y = F.interpolate(x, (height, width), mode="bilinear", antialias=True).flatten().tolist()
    print(f"    ({height}, {width}, &[")
    for at in range(0, len(y), 10):
        print("        " + ", ".join(repr(round(v, 6)) for v in y[at : at + 10]) + ",")
    print("    ]),")
