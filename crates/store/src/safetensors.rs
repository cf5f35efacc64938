//! Safetensors: a length, JSON that names the tensors, and their bytes.
//!
//! Written here and not with the format's crate, which keeps names in random order and wants the whole file in memory.

use crate::error::{Result, StoreError};
use crate::file::{self, Source, TensorFile};
use kiln_tensor::{DType, Data, MAX_RANK, Meta};
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Formatter;
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::Path;
use std::sync::Mutex;

/// The longest head that the format allows.
const LONGEST_HEAD: u64 = 100_000_000;
/// Where words stand in a head.
const WORDS: &str = "__metadata__";

/// Dtypes under the names that the format gives them.
const DTYPES: [(DType, &str); 13] = [
    (DType::F64, "F64"),
    (DType::F32, "F32"),
    (DType::F16, "F16"),
    (DType::BF16, "BF16"),
    (DType::I64, "I64"),
    (DType::I32, "I32"),
    (DType::I16, "I16"),
    (DType::I8, "I8"),
    (DType::U64, "U64"),
    (DType::U32, "U32"),
    (DType::U16, "U16"),
    (DType::U8, "U8"),
    (DType::Bool, "BOOL"),
];

/// A tensor in a head.
#[derive(Serialize, Deserialize)]
struct Info {
    dtype: String,
    #[serde(deserialize_with = "extents")]
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// A shape that ends when its rank is beyond any: a head of nothing but extents costs no memory.
fn extents<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Vec<usize>, D::Error> {
    struct Extents;
    impl<'de> Visitor<'de> for Extents {
        type Value = Vec<usize>;
        fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
            write!(f, "a shape of rank {MAX_RANK} at most")
        }
        fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> std::result::Result<Vec<usize>, A::Error> {
            let mut shape = Vec::new();
            while let Some(extent) = from.next_element()? {
                if shape.len() == MAX_RANK {
                    return Err(A::Error::invalid_length(shape.len() + 1, &self));
                }
                shape.push(extent);
            }
            Ok(shape)
        }
    }
    from.deserialize_seq(Extents)
}

/// What a head says. Read as it comes, each name once.
#[derive(Default)]
struct Head {
    words: BTreeMap<String, String>,
    tensors: BTreeMap<String, Info>,
}

impl<'de> Deserialize<'de> for Head {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Head, D::Error> {
        struct Parts;
        impl<'de> Visitor<'de> for Parts {
            type Value = Head;
            fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
                f.write_str("tensors by name")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> std::result::Result<Head, A::Error> {
                let mut head = Head::default();
                while let Some(name) = from.next_key::<String>()? {
                    if name == WORDS {
                        head.words = from.next_value()?;
                        continue;
                    }
                    match head.tensors.entry(name) {
                        Entry::Vacant(place) => drop(place.insert(from.next_value()?)),
                        Entry::Occupied(other) => {
                            return Err(A::Error::custom(format_args!(
                                "two tensors are named {}",
                                other.key()
                            )));
                        }
                    }
                }
                Ok(head)
            }
        }
        from.deserialize_map(Parts)
    }
}

pub(crate) fn read(to: &mut TensorFile, path: &Path, file: File) -> Result<()> {
    let failed = StoreError::file(path);
    let length = file.metadata().map_err(&failed)?.len();
    let mut reader = BufReader::new(&file);
    let mut head = [0; 8];
    reader.read_exact(&mut head).map_err(&failed)?;
    let head = u64::from_le_bytes(head);
    if head > LONGEST_HEAD || head > length.saturating_sub(8) {
        return Err(StoreError::damaged(path, format!("its head has {head} bytes, more than there can be")));
    }
    let parts: Head = serde_json::from_reader(reader.take(head)).map_err(|e| StoreError::damaged(path, e))?;
    to.metadata.extend(parts.words);
    let begin = 8 + head;
    let source = to.sources.len();
    let mut ranges = Vec::new();
    for (name, Info { dtype, shape, data_offsets: (start, end) }) in parts.tensors {
        let damaged = |reason: String| StoreError::damaged(path, format!("{name}: {reason}"));
        if start > end || end > length - begin {
            return Err(damaged(format!("bytes {start} to {end} are not in the file")));
        }
        ranges.push((start, end));
        let Some(&(dtype, _)) = DTYPES.iter().find(|(_, name)| *name == dtype) else {
            to.unsupported.insert(name, format!("Kiln has no dtype {dtype}"));
            continue;
        };
        let meta = meta(dtype, &shape).map_err(damaged)?;
        if meta.bytes() as u64 != end - start {
            return Err(damaged(format!("{meta} takes {} bytes, not {}", meta.bytes(), end - start)));
        }
        to.add(path, name, file::Entry { meta, source, member: 0, at: begin + start, strides: None })?;
    }
    ranges.sort_unstable();
    if ranges.windows(2).any(|pair| pair[0].1 > pair[1].0) {
        return Err(StoreError::damaged(path, "two tensors share bytes"));
    }
    to.sources.push(Source::Plain(path.into(), Mutex::new(file)));
    Ok(())
}

/// A dtype and shape from outside.
pub(crate) fn meta(dtype: DType, shape: &[usize]) -> std::result::Result<Meta, String> {
    if shape.len() > MAX_RANK {
        return Err(format!("rank {} is above the highest supported, {MAX_RANK}", shape.len()));
    }
    let meta = Meta::new(dtype, shape);
    meta.check().map_err(|e| e.to_string())?;
    Ok(meta)
}

/// An index: which file has which tensor.
#[derive(Serialize, Deserialize)]
struct Index {
    #[serde(default)]
    metadata: serde_json::Map<String, serde_json::Value>,
    weight_map: BTreeMap<String, String>,
}

pub(crate) fn read_index(to: &mut TensorFile) -> Result<()> {
    let path = to.path.clone();
    let file = File::open(&path).map_err(StoreError::file(&path))?;
    let index: Index = serde_json::from_reader(BufReader::new(file.take(LONGEST_HEAD)))
        .map_err(|e| StoreError::damaged(&path, format!("it is no index of tensors: {e}")))?;
    let mut files: Vec<&String> = index.weight_map.values().collect();
    files.sort_unstable();
    files.dedup();
    for name in files {
        // A name, and no way out of the folder.
        if Path::new(name).file_name() != Some(name.as_ref()) {
            return Err(StoreError::damaged(&path, format!("`{name}` is not the name of a file beside it")));
        }
        to.read_one(&path.with_file_name(name))?;
    }
    match index.weight_map.keys().find(|&n| !to.entries.contains_key(n) && !to.unsupported.contains_key(n)) {
        Some(name) => {
            let file = &index.weight_map[name];
            Err(StoreError::damaged(&path, format!("{name} is not in {file}")))
        }
        None => Ok(()),
    }
}

/// Writes tensors and words; equal ones give equal bytes.
pub(crate) fn write(
    path: &Path,
    file: &mut impl Write,
    tensors: &BTreeMap<String, Data>,
    words: &BTreeMap<String, String>,
) -> Result<()> {
    let unsupported = |reason: String| StoreError::unsupported(path, reason);
    let mut parts = BTreeMap::new();
    if !words.is_empty() {
        parts.insert(WORDS, serde_json::json!(words));
    }
    // Larger elements come first, so that all of them are aligned.
    let mut order: Vec<(&String, &Data)> = tensors.iter().collect();
    order.sort_by_key(|(_, data)| std::cmp::Reverse(data.meta.dtype.size()));
    let mut end = 0;
    for (name, data) in &order {
        let Some((_, dtype)) = DTYPES.iter().find(|(dtype, _)| *dtype == data.meta.dtype) else {
            return Err(unsupported(format!("{name}: safetensors have no {}", data.meta.dtype)));
        };
        if *name == WORDS {
            return Err(unsupported(format!("no tensor can be named {WORDS}")));
        }
        let data_offsets = (end, end + data.bytes.len() as u64);
        end = data_offsets.1;
        let info = Info { dtype: dtype.to_string(), shape: data.meta.shape.to_vec(), data_offsets };
        parts.insert(name, serde_json::json!(info));
    }
    let mut text = serde_json::to_vec(&parts).map_err(|e| unsupported(e.to_string()))?;
    text.resize(text.len().next_multiple_of(8), b' ');
    if text.len() as u64 > LONGEST_HEAD {
        return Err(unsupported("its names and words are too long for a safetensors file".into()));
    }
    let mut all = || {
        file.write_all(&(text.len() as u64).to_le_bytes())?;
        file.write_all(&text)?;
        order.iter().try_for_each(|(_, data)| file.write_all(&data.bytes))
    };
    all().map_err(StoreError::file(path))
}

/// The index of several files, in JSON.
pub(crate) fn index(weight_map: BTreeMap<String, String>, bytes: u64) -> Vec<u8> {
    let metadata = serde_json::Map::from_iter([("total_size".to_string(), serde_json::json!(bytes))]);
    let mut text = serde_json::to_vec_pretty(&Index { metadata, weight_map }).unwrap_or_default();
    text.push(b'\n');
    text
}
