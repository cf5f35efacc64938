//! NumPy's arrays: `.npy`, and `.npz`, which is a zip archive of them.

use crate::error::{Result, StoreError};
use crate::file::{Entry, Source, TensorFile};
use crate::safetensors::meta;
use kiln_tensor::{DType, Data, Meta};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::sync::Mutex;
use zip::{CompressionMethod, ZipArchive, ZipWriter, write::SimpleFileOptions};

const MAGIC: &[u8] = b"\x93NUMPY";
/// The longest head of an array: NumPy's own limit is the same.
const LONGEST_HEAD: u32 = 10_000;

/// Dtypes as NumPy writes them. There is none for bf16.
const DTYPES: [(DType, &str); 12] = [
    (DType::F64, "f8"),
    (DType::F32, "f4"),
    (DType::F16, "f2"),
    (DType::I64, "i8"),
    (DType::I32, "i4"),
    (DType::I16, "i2"),
    (DType::I8, "i1"),
    (DType::U64, "u8"),
    (DType::U32, "u4"),
    (DType::U16, "u2"),
    (DType::U8, "u1"),
    (DType::Bool, "b1"),
];

/// An array as its head says, or what Kiln cannot do with it; and how long the head is.
struct Head {
    array: std::result::Result<(Meta, Option<Vec<usize>>), String>,
    len: u64,
}

pub(crate) fn read_array(to: &mut TensorFile, path: &Path, mut file: File) -> Result<()> {
    let length = file.metadata().map_err(StoreError::file(path))?.len();
    file.rewind().map_err(StoreError::file(path))?;
    let head = head(path, &mut file)?;
    // An array has no name: it gets that of its file.
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    put(to, path, name, head, 0, length)?;
    to.sources.push(Source::Plain(path.into(), Mutex::new(file)));
    Ok(())
}

pub(crate) fn read_zip(to: &mut TensorFile, path: &Path, mut archive: ZipArchive<File>) -> Result<()> {
    let damaged = |e: zip::result::ZipError| StoreError::damaged(path, e);
    let mut arrays = 0;
    for member in 0..archive.len() {
        let mut file = archive.by_index(member).map_err(damaged)?;
        let name = file.name().map_err(damaged)?.into_owned();
        let Some(name) = name.strip_suffix(".npy") else { continue };
        arrays += 1;
        let size = file.size();
        let head = head(path, &mut file)?;
        drop(file);
        put(to, path, name.to_string(), head, member, size)?;
    }
    if arrays == 0 {
        return Err(StoreError::unsupported(path, "it is an archive with neither arrays nor a pickle in it"));
    }
    to.sources.push(Source::Zip(path.into(), Mutex::new(archive)));
    Ok(())
}

fn put(to: &mut TensorFile, path: &Path, name: String, head: Head, member: usize, size: u64) -> Result<()> {
    let (meta, strides) = match head.array {
        Ok(array) => array,
        Err(reason) => {
            to.unsupported.insert(name, reason);
            return Ok(());
        }
    };
    if size.checked_sub(head.len) != Some(meta.bytes() as u64) {
        return Err(StoreError::damaged(path, format!("{name}: {meta} has another number of bytes")));
    }
    to.add(path, name, Entry { meta, source: to.sources.len(), member, at: head.len, strides })
}

fn head(path: &Path, file: &mut impl Read) -> Result<Head> {
    let failed = StoreError::file(path);
    let mut start = [0; 8];
    file.read_exact(&mut start).map_err(&failed)?;
    if !start.starts_with(MAGIC) {
        return Err(StoreError::damaged(path, "an array does not begin as NumPy's do"));
    }
    let mut word = [0; 4];
    let wide = start[6] >= 2;
    file.read_exact(&mut word[..if wide { 4 } else { 2 }]).map_err(&failed)?;
    let len = u32::from_le_bytes(word);
    if len > LONGEST_HEAD || !(1..=3).contains(&start[6]) {
        return Err(StoreError::damaged(path, "an array's head is too long, or of a later version"));
    }
    let mut text = vec![0; len as usize];
    file.read_exact(&mut text).map_err(&failed)?;
    let text = String::from_utf8(text).map_err(|e| StoreError::damaged(path, e))?;
    let array =
        described(&text).map_err(|reason| StoreError::damaged(path, format!("{reason} in {text:?}")))?;
    Ok(Head { array, len: 8 + if wide { 4 } else { 2 } + len as u64 })
}

type Described = std::result::Result<(Meta, Option<Vec<usize>>), String>;

/// What a head says: `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`.
fn described(text: &str) -> std::result::Result<Described, &'static str> {
    let after = |key: &str| -> Option<&str> {
        let at = text.find(&format!("'{key}'"))?;
        text[at + key.len() + 2..].trim_start().strip_prefix(':').map(str::trim_start)
    };
    let descr = after("descr").ok_or("no dtype")?;
    let Some((descr, _)) = descr.strip_prefix('\'').and_then(|d| d.split_once('\'')) else {
        return Ok(Err("an array of records".into()));
    };
    let columns = match after("fortran_order").ok_or("no order")? {
        order if order.starts_with("False") => false,
        order if order.starts_with("True") => true,
        _ => return Err("no order"),
    };
    let shape = after("shape").and_then(|s| s.strip_prefix('(')?.split_once(')')).ok_or("no shape")?.0;
    let shape: Vec<usize> = shape
        .split(',')
        .map(str::trim)
        .filter(|extent| !extent.is_empty())
        .map(|extent| extent.parse().map_err(|_| "no shape"))
        .collect::<std::result::Result<_, _>>()?;
    // The first letter is the order of bytes; `|` where there is but one.
    let (order, kind) = descr.split_at_checked(1).ok_or("no dtype")?;
    let found = DTYPES.iter().find(|(_, name)| *name == kind);
    let Some(&(dtype, _)) = found.filter(|(dtype, _)| order == "<" || order == "|" || dtype.size() == 1)
    else {
        return Ok(Err(format!("Kiln does not read arrays of {descr}")));
    };
    let meta = match meta(dtype, &shape) {
        Ok(meta) => meta,
        Err(reason) => return Ok(Err(reason)),
    };
    let mut stride = 1;
    let by_columns = |&extent: &usize| {
        let own = stride;
        // Where this is no number, another extent is 0 and there is nothing to read.
        stride = usize::saturating_mul(stride, extent.max(1));
        own
    };
    let strides = (columns && shape.len() > 1).then(|| shape.iter().map(by_columns).collect());
    Ok(Ok((meta, strides)))
}

/// Writes one array.
pub(crate) fn write_array(path: &Path, name: &str, file: &mut impl Write, data: &Data) -> Result<()> {
    let Some((dtype, kind)) = DTYPES.iter().find(|(dtype, _)| *dtype == data.meta.dtype) else {
        return Err(StoreError::unsupported(path, format!("{name}: NumPy has no {}", data.meta.dtype)));
    };
    let extents: Vec<String> = data.meta.shape.iter().map(|extent| format!("{extent},")).collect();
    let order = if dtype.size() == 1 { '|' } else { '<' };
    let mut text =
        format!("{{'descr': '{order}{kind}', 'fortran_order': False, 'shape': ({}), }}", extents.join(" "));
    // With its end, all of the head is a multiple of 64 bytes.
    let len = (MAGIC.len() + 4 + text.len() + 1).next_multiple_of(64) - MAGIC.len() - 4;
    text.push_str(&" ".repeat(len - text.len() - 1));
    text.push('\n');
    let mut all = || {
        file.write_all(MAGIC)?;
        file.write_all(&[1, 0])?;
        file.write_all(&(len as u16).to_le_bytes())?;
        file.write_all(text.as_bytes())?;
        file.write_all(&data.bytes)
    };
    all().map_err(StoreError::file(path))
}

/// Writes an archive of arrays, not compressed.
pub(crate) fn write_zip(path: &Path, file: &mut File, tensors: &BTreeMap<String, Data>) -> Result<()> {
    let damaged = |e: zip::result::ZipError| StoreError::damaged(path, e);
    let mut writer = ZipWriter::new(file);
    for (name, data) in tensors {
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .large_file(data.bytes.len() as u64 >= u32::MAX as u64 - 256);
        writer.start_file(format!("{name}.npy"), options).map_err(damaged)?;
        write_array(path, name, &mut writer, data)?;
    }
    writer.finish().map(drop).map_err(damaged)
}
