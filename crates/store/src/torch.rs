//! PyTorch's `.pt` and `.pth`: a zip archive with a pickle and a file for each storage, or, before version 1.6, pickles one
//! after another and then the storages.

use crate::error::{Result, StoreError};
use crate::file::{Entry, Source, TensorFile};
use crate::pickle::{self, Heap, Node, Value};
use crate::safetensors::meta;
use kiln_tensor::DType;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Mutex;
use zip::ZipArchive;

/// The longest pickle that is read: it names tensors and does not hold them.
const LONGEST: u64 = 64 << 20;
/// How deep containers may lie in each other, how long a path may be, and how often a container may be come by.
const DEEPEST: usize = 64;
const LONGEST_PATH: usize = 4096;
const MOST: usize = 1 << 22;
/// PyTorch's word at the front of a file of the old kind.
const OLD: &[u8] =
    &[0x80, 0x02, 0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.'];

/// Dtypes by the names of storages, and of dtypes themselves.
const DTYPES: [(DType, &str, &str); 13] = [
    (DType::F64, "DoubleStorage", "float64"),
    (DType::F32, "FloatStorage", "float32"),
    (DType::F16, "HalfStorage", "float16"),
    (DType::BF16, "BFloat16Storage", "bfloat16"),
    (DType::I64, "LongStorage", "int64"),
    (DType::I32, "IntStorage", "int32"),
    (DType::I16, "ShortStorage", "int16"),
    (DType::I8, "CharStorage", "int8"),
    (DType::U8, "ByteStorage", "uint8"),
    (DType::Bool, "BoolStorage", "bool"),
    (DType::U16, "UInt16Storage", "uint16"),
    (DType::U32, "UInt32Storage", "uint32"),
    (DType::U64, "UInt64Storage", "uint64"),
];

/// Where a storage lies: which member of the source, its first byte, and how many there are.
#[derive(Clone, Copy)]
struct Storage {
    member: usize,
    at: u64,
    bytes: u64,
}

pub(crate) fn read_zip(to: &mut TensorFile, path: &Path, mut archive: ZipArchive<File>) -> Result<()> {
    let damaged = |e: zip::result::ZipError| StoreError::damaged(path, e);
    let mut storages = HashMap::new();
    let (mut pickle, mut order) = (None, String::from("little"));
    for member in 0..archive.len() {
        let file = archive.by_index(member).map_err(damaged)?;
        let name = file.name().map_err(damaged)?.into_owned();
        // Everything is in one folder, whose name says nothing.
        let Some((_, name)) = name.split_once('/') else { continue };
        let size = file.size();
        if name == "data.pkl" || name == "byteorder" {
            let limit = if name == "byteorder" { 16 } else { LONGEST };
            let mut bytes = Vec::new();
            file.take(limit + 1).read_to_end(&mut bytes).map_err(StoreError::file(path))?;
            if bytes.len() as u64 > limit {
                return Err(StoreError::unsupported(path, format!("{name} has more than {limit} bytes")));
            }
            match name {
                "data.pkl" => pickle = Some(bytes),
                _ => order = String::from_utf8_lossy(&bytes).trim().to_string(),
            }
        } else if let Some(key) = name.strip_prefix("data/") {
            // Storages are stored as they are: what they take is in the file.
            if file.compression() != zip::CompressionMethod::Stored || size != file.compressed_size() {
                return Err(StoreError::unsupported(path, format!("storage {key} is compressed")));
            }
            storages.insert(key.to_string(), Storage { member, at: 0, bytes: size });
        }
    }
    let pickle = pickle.ok_or_else(|| StoreError::damaged(path, "it has no data.pkl"))?;
    if order != "little" {
        return Err(StoreError::unsupported(path, format!("its numbers are {order}-endian")));
    }
    let mut heap = Heap::default();
    let (root, _) = pickle::read(&pickle, &mut heap).map_err(|e| StoreError::damaged(path, e))?;
    let source = to.sources.len();
    collect(to, path, &heap, root, &Storages { source, by: &storages })?;
    to.sources.push(Source::Zip(path.into(), Mutex::new(archive)));
    Ok(())
}

pub(crate) fn read_legacy(to: &mut TensorFile, path: &Path, mut file: File) -> Result<()> {
    let failed = StoreError::file(path);
    let damaged = |e: String| StoreError::damaged(path, e);
    let length = file.metadata().map_err(&failed)?.len();
    let mut bytes = Vec::new();
    (&mut file).take(LONGEST).read_to_end(&mut bytes).map_err(&failed)?;
    if !bytes.starts_with(OLD) {
        return Err(StoreError::unsupported(path, "it is a pickle, but not one that PyTorch wrote"));
    }
    // A magic number, a version, words about the machine, what was saved, and the keys of the storages in their order.
    let mut heap = Heap::default();
    let mut at = OLD.len();
    let mut parts = [Value::None; 4];
    for part in &mut parts {
        let (value, len) = pickle::read(&bytes[at..], &mut heap).map_err(damaged)?;
        (*part, at) = (value, at + len);
    }
    let [version, system, root, keys] = parts;
    if version != Value::Int(1001) {
        return Err(StoreError::unsupported(path, "it is of a version that PyTorch does not have"));
    }
    if let Some(Node::Dict(words)) = heap.node(system)
        && words
            .iter()
            .any(|(key, value)| heap.text(*key) == Some("little_endian") && *value == Value::Bool(false))
    {
        return Err(StoreError::unsupported(path, "its numbers are big-endian"));
    }
    let keys: Vec<&str> = heap.items(keys).unwrap_or(&[]).iter().filter_map(|key| heap.text(*key)).collect();
    // Each storage is a number of elements, and these; how large they are is said where it is used.
    let sizes = element_sizes(&heap);
    let (mut storages, mut at) = (HashMap::new(), at as u64);
    for key in keys {
        let mut count = [0; 8];
        file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut count)).map_err(&failed)?;
        let size = *sizes.get(key).ok_or_else(|| damaged(format!("storage {key} is not used")))?;
        let bytes = u64::from_le_bytes(count).checked_mul(size);
        let bytes = bytes.filter(|&b| b <= length.saturating_sub(at + 8));
        let bytes = bytes.ok_or_else(|| damaged(format!("storage {key} is not whole")))?;
        storages.insert(key.to_string(), Storage { member: 0, at: at + 8, bytes });
        at += 8 + bytes;
    }
    let source = to.sources.len();
    collect(to, path, &heap, root, &Storages { source, by: &storages })?;
    to.sources.push(Source::Plain(path.into(), Mutex::new(file)));
    Ok(())
}

/// How many bytes an element takes in each storage that a pickle names.
fn element_sizes(heap: &Heap) -> HashMap<&str, u64> {
    let outside = heap.nodes().filter_map(|node| match node {
        Node::Outside(name) => named(heap, *name),
        _ => None,
    });
    outside.filter_map(|(class, key)| Some((key, size_of(class)?))).collect()
}

/// The class and key of a storage: `('storage', class, key, place, count)`.
fn named(heap: &Heap, name: Value) -> Option<(&str, &str)> {
    let items = heap.items(name)?;
    if heap.text(*items.first()?)? != "storage" {
        return None;
    }
    Some((heap.global(*items.get(1)?)?.1, heap.text(*items.get(2)?)?))
}

fn size_of(class: &str) -> Option<u64> {
    match class {
        "ComplexDoubleStorage" => Some(16),
        "ComplexFloatStorage" => Some(8),
        "QInt32Storage" => Some(4),
        "UntypedStorage" | "QInt8Storage" | "QUInt8Storage" => Some(1),
        _ => DTYPES.iter().find(|(_, name, _)| *name == class).map(|(dtype, ..)| dtype.size() as u64),
    }
}

/// The storages of a file.
struct Storages<'a> {
    source: usize,
    by: &'a HashMap<String, Storage>,
}

/// Adds all tensors that `root` holds, by their paths.
fn collect(
    to: &mut TensorFile,
    path: &Path,
    heap: &Heap,
    root: Value,
    storages: &Storages<'_>,
) -> Result<()> {
    let mut walk = Walk { to, path, heap, storages, come_by: 0 };
    match walk.node(root, &mut String::new(), 0) {
        Ok(()) => Ok(()),
        Err(Stop::Damaged(reason)) => Err(StoreError::damaged(path, reason)),
        Err(Stop::Store(error)) => Err(error),
    }
}

enum Stop {
    Damaged(String),
    Store(StoreError),
}

impl From<String> for Stop {
    fn from(reason: String) -> Stop {
        Stop::Damaged(reason)
    }
}

struct Walk<'a> {
    to: &'a mut TensorFile,
    path: &'a Path,
    heap: &'a Heap,
    storages: &'a Storages<'a>,
    come_by: usize,
}

impl Walk<'_> {
    /// What lies below `name`.
    fn node(&mut self, value: Value, name: &mut String, depth: usize) -> std::result::Result<(), Stop> {
        let heap = self.heap;
        let Some(node) = heap.node(value) else { return Ok(()) };
        self.come_by += 1;
        if depth > DEEPEST || self.come_by > MOST {
            return Err("what it holds lies too deep, or holds itself".to_string().into());
        }
        match node {
            Node::Dict(pairs) => {
                for (key, value) in pairs {
                    let int;
                    let key = match *key {
                        Value::Int(key) => {
                            int = key.to_string();
                            &int
                        }
                        key => heap.text(key).unwrap_or_default(),
                    };
                    self.below(key, *value, name, depth)?;
                }
                Ok(())
            }
            Node::List(items) | Node::Tuple(items) => items
                .iter()
                .enumerate()
                .try_for_each(|(i, value)| self.below(&i.to_string(), *value, name, depth)),
            Node::Object { class, args, state } => match heap.global(*class) {
                Some(("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state")) => {
                    let data = heap.items(*args).and_then(|args| args.first().copied());
                    self.node(data.ok_or("a parameter without data".to_string())?, name, depth + 1)
                }
                Some(("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor" | "_rebuild_tensor_v3")) => {
                    self.tensor(*args, name)
                }
                // A whole model: its parameters, buffers and parts are in dicts of these names.
                _ => self.object(*state, name, depth),
            },
            Node::Outside(_) => Ok(()),
        }
    }

    fn below(
        &mut self,
        key: &str,
        value: Value,
        name: &mut String,
        depth: usize,
    ) -> std::result::Result<(), Stop> {
        if self.heap.node(value).is_none() {
            return Ok(());
        }
        let len = name.len();
        if len + key.len() > LONGEST_PATH {
            return Err("the name of a tensor is too long".to_string().into());
        }
        if len > 0 {
            name.push('.');
        }
        name.push_str(key);
        let outcome = self.node(value, name, depth + 1);
        name.truncate(len);
        outcome
    }

    fn object(&mut self, state: Value, name: &mut String, depth: usize) -> std::result::Result<(), Stop> {
        let heap = self.heap;
        let Some(Node::Dict(fields)) = heap.node(state) else { return Ok(()) };
        for (key, value) in fields {
            if let Some("_parameters" | "_buffers" | "_modules") = heap.text(*key) {
                self.node(*value, name, depth + 1)?;
            }
        }
        Ok(())
    }

    /// `(storage, offset, size, stride, ..)`, and the dtype as the seventh where a storage has none.
    fn tensor(&mut self, args: Value, name: &str) -> std::result::Result<(), Stop> {
        let heap = self.heap;
        let damaged = |reason: &str| Stop::Damaged(format!("{name}: {reason}"));
        let args = heap.items(args).unwrap_or(&[]);
        let arg = |at: usize| args.get(at).copied().unwrap_or(Value::None);
        let Some(Node::Outside(storage)) = heap.node(arg(0)) else {
            return Err(damaged("a tensor without a storage"));
        };
        let (class, key) = named(heap, *storage).ok_or_else(|| damaged("a tensor without a storage"))?;
        let storage = *self.storages.by.get(key).ok_or_else(|| damaged("its storage is not in the file"))?;
        let word = heap.global(arg(6)).map(|(_, dtype)| dtype);
        let found =
            DTYPES.iter().find(|(_, storage, dtype)| word.map_or(*storage == class, |word| *dtype == word));
        let Some(&(dtype, ..)) = found else {
            let reason = format!("Kiln has no dtype for {}", word.unwrap_or(class));
            self.to.unsupported.insert(name.into(), reason);
            return Ok(());
        };
        let numbers = |value: Value| -> Option<Vec<usize>> {
            let number = |v: &Value| match *v {
                Value::Int(n) => usize::try_from(n).ok(),
                _ => None,
            };
            // A size may be an object of its own class.
            let items = match heap.node(value)? {
                Node::Object { args, .. } => heap.items(*heap.items(*args)?.first()?)?,
                _ => heap.items(value)?,
            };
            items.iter().map(number).collect()
        };
        let Value::Int(offset) = arg(1) else { return Err(damaged("a tensor without an offset")) };
        let (Some(shape), Some(strides)) = (numbers(arg(2)), numbers(arg(3))) else {
            return Err(damaged("a tensor without a shape"));
        };
        if shape.len() != strides.len() {
            return Err(damaged("its shape and strides differ in rank"));
        }
        let meta = meta(dtype, &shape).map_err(|reason| damaged(&reason))?;
        let span = Entry::span(&meta, &strides).ok_or_else(|| damaged("its strides are too large"))? as u64;
        let size = dtype.size() as u64;
        let offset = u64::try_from(offset).map_err(|_| damaged("its offset is negative"))?;
        let end = offset.checked_add(span).and_then(|end| end.checked_mul(size));
        if end.is_none_or(|end| end > storage.bytes) {
            return Err(damaged("it reaches beyond its storage"));
        }
        if meta.shape.numel() as u64 > storage.bytes / size {
            // Its content would take more memory than the file.
            self.to.unsupported.insert(name.into(), "it repeats the elements of a smaller tensor".into());
            return Ok(());
        }
        let mut dense = 1;
        let row_major = meta.shape.iter().zip(&strides).rev().all(|(&extent, &stride)| {
            let fits = extent == 1 || stride == dense;
            dense = usize::saturating_mul(dense, extent.max(1));
            fits
        });
        let strides = (!row_major && span > 0).then_some(strides);
        let at = storage.at + offset * size;
        let entry = Entry { meta, source: self.storages.source, member: storage.member, at, strides };
        self.to.add(self.path, name.to_string(), entry).map_err(Stop::Store)
    }
}
