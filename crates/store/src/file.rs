//! Files of named tensors, whatever their format.

use crate::error::{Result, StoreError};
use crate::{numpy, safetensors, torch};
use kiln_device::Place;
use kiln_tensor::{Bytes, DType, Data, Device, Meta, Tensor};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use zip::{CompressionMethod, ZipArchive};

/// What tensors are read from: files, and members of an archive.
pub(crate) enum Source {
    /// A range of a file is a tensor.
    Plain(PathBuf, Mutex<File>),
    /// A range of a member of a zip archive is.
    Zip(PathBuf, Mutex<ZipArchive<File>>),
}

impl Source {
    fn path(&self) -> &Path {
        match self {
            Source::Plain(path, _) | Source::Zip(path, _) => path,
        }
    }

    /// Fills `out` with what lies at byte `at` of a member (of the file, if it has none).
    pub(crate) fn fill(&self, member: usize, at: u64, out: &mut [u8]) -> Result<()> {
        let failed = StoreError::file(self.path());
        match self {
            Source::Plain(_, file) => {
                let mut file = lock(file);
                file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(out)).map_err(failed)
            }
            Source::Zip(path, archive) => {
                let mut archive = lock(archive);
                let zip = |e: zip::result::ZipError| StoreError::damaged(path, e);
                if let Ok(mut member) = archive.by_index_seek(member) {
                    return member
                        .seek(SeekFrom::Start(at))
                        .and_then(|_| member.read_exact(out))
                        .map_err(failed);
                }
                let mut member = archive.by_index(member).map_err(zip)?;
                std::io::copy(&mut (&mut member).take(at), &mut std::io::sink())
                    .and_then(|_| member.read_exact(out))
                    .map_err(failed)
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// No deflated byte stands for more bytes than this.
const MOST_DEFLATED: u64 = 1032;

/// An archive whose directory does not claim more than its file can hold: what it says of sizes is what memory is asked for.
fn opened(path: &Path, file: File) -> Result<ZipArchive<File>> {
    let length = file.metadata().map_err(StoreError::file(path))?.len();
    let damaged = |e: zip::result::ZipError| StoreError::damaged(path, e);
    let archive = ZipArchive::new(file).map_err(damaged)?;
    let mut all = 0u64;
    for member in 0..archive.len() {
        let entry = archive.by_index_data(member).map_err(damaged)?;
        let (size, packed) = (entry.size(), entry.compressed_size());
        all = all.saturating_add(packed);
        let most = match entry.compression() {
            CompressionMethod::Stored => packed,
            _ => packed.saturating_mul(MOST_DEFLATED),
        };
        if size > most || all > length {
            return Err(StoreError::damaged(path, "its directory claims more than the file holds"));
        }
    }
    Ok(archive)
}

/// Memory for a tensor's content. What a file claims was checked, but the machine may still not have that much.
fn zeros(path: &Path, len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if bytes.try_reserve_exact(len).is_err() {
        return Err(StoreError::unsupported(path, format!("there is no memory for {len} bytes")));
    }
    bytes.resize(len, 0);
    Ok(bytes)
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub meta: Meta,
    /// Which source, and which member of it.
    pub source: usize,
    pub member: usize,
    /// Its first byte.
    pub at: u64,
    /// Where it is not contiguous and row-major: how many elements lie between two neighbours along each axis.
    pub strides: Option<Vec<usize>>,
}

impl Entry {
    /// How many elements lie between its first and its last, and one; `None` if that is no number.
    pub(crate) fn span(meta: &Meta, strides: &[usize]) -> Option<usize> {
        if meta.shape.contains(&0) {
            return Some(0);
        }
        meta.shape
            .iter()
            .zip(strides)
            .try_fold(1usize, |span, (&extent, &stride)| span.checked_add((extent - 1).checked_mul(stride)?))
    }
}

/// Named tensors in a file, in several, or in a folder.
///
/// What it is is seen by its content: safetensors, PyTorch's `.pt` and `.pth` of any age, NumPy's `.npy` and `.npz`, an
/// index of several of these (`model.safetensors.index.json`), or a folder with one of them, as Hugging Face keeps models.
/// Opening reads the names; the content of a tensor is read when it is asked for, straight into memory of its device.
///
/// ```
/// # use kiln_tensor::{Device, Tensor};
/// # use kiln_store::TensorFile;
/// # let path = std::env::temp_dir().join(format!("kiln-doc-{}.safetensors", std::process::id()));
/// let device = Device::cpu();
/// kiln_store::save(&path, [("a", &Tensor::ones([2, 3], &device))])?;
/// let file = TensorFile::open(&path)?;
/// for (name, meta) in file.metas() {
///     println!("{name} {meta}");
/// }
/// let a = file.tensor("a", &device)?;
/// # assert_eq!(a.shape(), [2, 3].into());
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), kiln_store::StoreError>(())
/// ```
pub struct TensorFile {
    pub(crate) path: PathBuf,
    pub(crate) sources: Vec<Source>,
    pub(crate) entries: BTreeMap<String, Entry>,
    pub(crate) unsupported: BTreeMap<String, String>,
    pub(crate) metadata: BTreeMap<String, String>,
}

/// What folders of models call their files, best first.
const NAMES: [&str; 5] = [
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "adapter_model.safetensors",
];

impl TensorFile {
    /// Opens a file or folder.
    pub fn open(path: impl AsRef<Path>) -> Result<TensorFile> {
        let path = path.as_ref();
        if path.is_dir() {
            let found = NAMES.iter().map(|name| path.join(name)).find(|file| file.is_file());
            return match found {
                Some(file) => TensorFile::open(file),
                None => Err(StoreError::unsupported(path, format!("it has none of {}", NAMES.join(", ")))),
            };
        }
        let mut file = TensorFile::empty(path);
        if path.extension().is_some_and(|e| e == "json") {
            safetensors::read_index(&mut file)?;
        } else {
            file.read_one(path)?;
        }
        Ok(file)
    }

    fn empty(path: &Path) -> TensorFile {
        TensorFile {
            path: path.into(),
            sources: Vec::new(),
            entries: BTreeMap::new(),
            unsupported: BTreeMap::new(),
            metadata: BTreeMap::new(),
        }
    }

    /// Adds what a file holds.
    pub(crate) fn read_one(&mut self, path: &Path) -> Result<()> {
        let failed = StoreError::file(path);
        let mut file = File::open(path).map_err(&failed)?;
        let mut start = Vec::new();
        (&mut file).take(16).read_to_end(&mut start).map_err(&failed)?;
        file.rewind().map_err(&failed)?;
        match start[..] {
            [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => numpy::read_array(self, path, file),
            [b'P', b'K', 3 | 5, 4 | 6, ..] => {
                let archive = opened(path, file)?;
                let pickled = archive.file_names().any(|name| name.is_ok_and(|n| n.ends_with("data.pkl")));
                if pickled {
                    torch::read_zip(self, path, archive)
                } else {
                    numpy::read_zip(self, path, archive)
                }
            }
            // A pickle of protocol 2 or later.
            [0x80, 2..=5, ..] => torch::read_legacy(self, path, file),
            // The length of a head in JSON.
            [_, _, _, _, _, _, _, _, b'{', ..] => safetensors::read(self, path, file),
            _ => Err(StoreError::unsupported(
                path,
                "it is no safetensors file, none of PyTorch's of version 0.4 or later, and none of NumPy's",
            )),
        }
    }

    /// Adds a tensor; two of the same name are an error.
    pub(crate) fn add(&mut self, path: &Path, name: String, entry: Entry) -> Result<()> {
        match self.entries.insert(name, entry) {
            None => Ok(()),
            Some(_) => Err(StoreError::damaged(path, "two tensors have the same name")),
        }
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names, dtypes and shapes, by name.
    pub fn metas(&self) -> impl Iterator<Item = (&str, Meta)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry.meta))
    }

    /// Words that were saved with the tensors.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Tensors that Kiln has no dtype for, with what they are. They are left out of [`TensorFile::metas`].
    pub fn unsupported(&self) -> &BTreeMap<String, String> {
        &self.unsupported
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        if let Some(entry) = self.entries.get(name) {
            return Ok(entry);
        }
        if let Some(reason) = self.unsupported.get(name) {
            return Err(StoreError::unsupported(&self.path, format!("{name}: {reason}")));
        }
        let like = |have: &&String| {
            let common = have.bytes().rev().zip(name.bytes().rev()).take_while(|(a, b)| a == b).count();
            (common, std::cmp::Reverse(have.len()))
        };
        let nearest = self.entries.keys().max_by_key(like).cloned();
        Err(StoreError::Missing { path: self.path.clone(), name: name.into(), nearest })
    }

    /// A tensor's content, to be written to `out`, which has its size.
    fn fill(&self, entry: &Entry, out: &mut [u8]) -> Result<()> {
        let source = &self.sources[entry.source];
        match &entry.strides {
            None => source.fill(entry.member, entry.at, out)?,
            Some(strides) => {
                let size = entry.meta.dtype.size();
                let span = Entry::span(&entry.meta, strides).unwrap_or(0);
                let mut all = zeros(&self.path, span.saturating_mul(size))?;
                source.fill(entry.member, entry.at, &mut all)?;
                gather(&entry.meta.shape, strides, size, &all, out);
            }
        }
        if entry.meta.dtype == DType::Bool {
            out.iter_mut().for_each(|byte| *byte = (*byte != 0) as u8);
        }
        Ok(())
    }

    /// A tensor's content on the host.
    pub fn data(&self, name: &str) -> Result<Data> {
        let entry = self.entry(name)?;
        let mut bytes = zeros(&self.path, entry.meta.bytes())?;
        self.fill(entry, &mut bytes)?;
        Ok(Data::new(entry.meta, Bytes::new(bytes)))
    }

    /// A tensor on a device, read straight into its memory where the device lends some.
    pub fn tensor(&self, name: &str, device: &Device) -> Result<Tensor> {
        let entry = self.entry(name)?;
        let bytes = entry.meta.bytes();
        let data = match device.driver().upload_buffer(bytes, Place::Persistent) {
            Some(mut buffer) => {
                self.fill(entry, buffer.bytes())?;
                Data::new(entry.meta, buffer.done())
            }
            None => self.data(name)?,
        };
        Ok(device.persistent(|| Tensor::from_data(data, device)))
    }

    /// All tensors on a device, floats as `dtype` if one is given.
    pub fn tensors(&self, device: &Device, dtype: Option<DType>) -> Result<BTreeMap<String, Tensor>> {
        let one = |name: &String| -> Result<(String, Tensor)> {
            let tensor = self.tensor(name, device)?;
            let want = dtype.filter(|_| tensor.dtype().is_float()).unwrap_or(tensor.dtype());
            Ok((name.clone(), device.persistent(|| tensor.to_dtype(want))))
        };
        self.entries.keys().map(one).collect()
    }
}

/// Copies elements of `size` bytes from where they lie with strides into row-major order.
fn gather(shape: &[usize], strides: &[usize], size: usize, from: &[u8], out: &mut [u8]) {
    let Some((&extent, inner)) = shape.split_first() else {
        out.copy_from_slice(&from[..size]);
        return;
    };
    if out.is_empty() {
        return;
    }
    let each = out.len() / extent;
    for (i, out) in out.chunks_exact_mut(each).enumerate() {
        gather(inner, &strides[1..], size, &from[i * strides[0] * size..], out);
    }
}
