//! Checkpoints: named tensors and words in one file, written whole or not at all.
//!
//! A checkpoint is a safetensors file whose metadata hold the job's words and the sha256 of everything. It is written
//! beside its place, brought to the disk and renamed, so that a file with the right name is complete; reading verifies
//! the sum, so that a damaged one is not taken for good.

use kiln_tensor::{DType, Data, Device, Error, Meta, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Checkpoints kept in a folder: the newest, and one to fall back to.
const KEPT: usize = 2;
const SUM: &str = "sha256";
const STEP: &str = "step";

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CheckpointError {
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("{}: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("{}: it holds {got} where {want} is needed", path.display())]
    Other { path: PathBuf, want: String, got: String },
    #[error(transparent)]
    Device(#[from] Error),
}

/// A job's state after some steps.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Steps done.
    pub step: u64,
    /// What describes the job.
    pub words: BTreeMap<String, String>,
    /// Parameters and whatever else there is, by name.
    pub tensors: BTreeMap<String, Data>,
    /// Where it was read from.
    pub path: PathBuf,
}

impl Checkpoint {
    /// Writes a checkpoint into `folder`. When this returns, it is on the disk.
    pub fn save(
        folder: &Path,
        step: u64,
        words: &BTreeMap<String, String>,
        tensors: &[(String, Tensor)],
    ) -> Result<PathBuf, CheckpointError> {
        // All reads are asked for before the first is waited for.
        let reads: Vec<_> = tensors.iter().map(|(name, t)| (name.clone(), t.to_data_async())).collect();
        let mut data = BTreeMap::new();
        for (name, read) in reads {
            data.insert(name, read.wait()?);
        }
        let path = folder.join(format!("step-{step:010}.safetensors"));
        let failed = |source| CheckpointError::File { path: path.clone(), source };
        let mut metadata: HashMap<String, String> = words.clone().into_iter().collect();
        metadata.insert(STEP.into(), step.to_string());
        metadata.insert(SUM.into(), sum(step, words, &data));
        let mut views = Vec::new();
        for (name, data) in &data {
            let dtype = dtype(data.meta.dtype).ok_or_else(|| CheckpointError::Other {
                path: path.clone(),
                want: "a dtype that safetensors have".into(),
                got: data.meta.dtype.name().into(),
            })?;
            let view = TensorView::new(dtype, data.meta.shape.to_vec(), &data.bytes);
            let view = view.map_err(|e| failed(std::io::Error::other(e)))?;
            views.push((name.as_str(), view));
        }
        let bytes =
            safetensors::serialize(views, Some(metadata)).map_err(|e| failed(std::io::Error::other(e)))?;
        let write = || -> std::io::Result<()> {
            fs::create_dir_all(folder)?;
            let temporary = folder.join(format!(".{}.{step}.tmp", std::process::id()));
            let mut file = File::create(&temporary)?;
            let written = file.write_all(&bytes).and_then(|()| file.sync_all());
            if let Err(e) = written.and_then(|()| fs::rename(&temporary, &path)) {
                let _ = fs::remove_file(&temporary);
                return Err(e);
            }
            // The name is on the disk when its folder is.
            File::open(folder)?.sync_all()
        };
        write().map_err(failed)?;
        for old in list(folder)?.into_iter().rev().skip(KEPT) {
            let _ = fs::remove_file(old);
        }
        Ok(path)
    }

    /// The newest checkpoint of `folder` that is whole, and what was wrong with newer ones; nothing if there is none.
    pub fn latest(folder: &Path) -> Result<(Option<Checkpoint>, Vec<CheckpointError>), CheckpointError> {
        let mut bad = Vec::new();
        for path in list(folder)?.into_iter().rev() {
            match Checkpoint::read(&path) {
                Ok(checkpoint) => return Ok((Some(checkpoint), bad)),
                Err(e) => bad.push(e),
            }
        }
        Ok((None, bad))
    }

    /// Reads and verifies one file.
    pub fn read(path: &Path) -> Result<Checkpoint, CheckpointError> {
        let damaged = |reason: String| CheckpointError::Damaged { path: path.into(), reason };
        let bytes = fs::read(path).map_err(|source| CheckpointError::File { path: path.into(), source })?;
        let (_, head) = SafeTensors::read_metadata(&bytes).map_err(|e| damaged(e.to_string()))?;
        let mut words: BTreeMap<String, String> =
            head.metadata().clone().unwrap_or_default().into_iter().collect();
        let file = SafeTensors::deserialize(&bytes).map_err(|e| damaged(e.to_string()))?;
        let step = words
            .remove(STEP)
            .and_then(|s| s.parse().ok())
            .ok_or_else(|| damaged("it has no step".into()))?;
        let want = words.remove(SUM).ok_or_else(|| damaged("it has no checksum".into()))?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.tensors() {
            let dtype =
                from_dtype(view.dtype()).ok_or_else(|| damaged(format!("{name} has a foreign dtype")))?;
            let meta = Meta::new(dtype, view.shape());
            meta.check().map_err(|e| damaged(e.to_string()))?;
            if meta.bytes() != view.data().len() {
                return Err(damaged(format!("{name} has another number of bytes than its shape")));
            }
            tensors.insert(name, Data::new(meta, kiln_tensor::Bytes::new(view.data().to_vec())));
        }
        if sum(step, &words, &tensors) != want {
            return Err(damaged("its checksum is wrong".into()));
        }
        Ok(Checkpoint { step, words, tensors, path: path.into() })
    }

    /// Whether a word is what it should be.
    pub fn expect(&self, word: &str, want: &str) -> Result<(), CheckpointError> {
        match self.words.get(word).map_or("nothing", String::as_str) {
            got if got == want => Ok(()),
            got => Err(CheckpointError::Other {
                path: self.path.clone(),
                want: format!("{word} {want}"),
                got: format!("{word} {got}"),
            }),
        }
    }

    /// A tensor of this meta on a device.
    pub fn tensor(&self, name: &str, meta: Meta, device: &Device) -> Result<Tensor, CheckpointError> {
        let other = |got: String| CheckpointError::Other {
            path: self.path.clone(),
            want: format!("{name} of {meta}"),
            got,
        };
        let data = self.tensors.get(name).ok_or_else(|| other("nothing".into()))?;
        if data.meta != meta {
            return Err(other(data.meta.to_string()));
        }
        Ok(device.persistent(|| Tensor::from_data(data.clone(), device)))
    }
}

/// The checkpoints of a folder, oldest first.
fn list(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        Err(source) => return Err(CheckpointError::File { path: folder.into(), source }),
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("step-") && name.ends_with(".safetensors") {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// The sha256 of everything that a checkpoint says.
fn sum(step: u64, words: &BTreeMap<String, String>, tensors: &BTreeMap<String, Data>) -> String {
    let mut hash = Sha256::new();
    hash.update(format!("step {step}\n"));
    for (word, meaning) in words {
        hash.update(format!("{word:?} {meaning:?}\n"));
    }
    for (name, data) in tensors {
        hash.update(format!("{name:?} {}\n", data.meta));
        hash.update(&data.bytes[..]);
    }
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Dtypes under the names that safetensors give them.
const DTYPES: [(DType, Dtype); 8] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::U8, Dtype::U8),
    (DType::Bool, Dtype::BOOL),
];

fn dtype(dtype: DType) -> Option<Dtype> {
    DTYPES.iter().find(|(ours, _)| *ours == dtype).map(|(_, theirs)| *theirs)
}

fn from_dtype(dtype: Dtype) -> Option<DType> {
    DTYPES.iter().find(|(_, theirs)| *theirs == dtype).map(|(ours, _)| *ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("kiln-checkpoint-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        path
    }

    fn save(folder: &Path, step: u64) -> PathBuf {
        let device = Device::cpu();
        let tensors = vec![
            ("a".to_string(), Tensor::from_slice(&[step as f32, 2.0], [2], &device)),
            ("empty".to_string(), Tensor::from_slice::<i64>(&[], [0, 3], &device)),
        ];
        let words = BTreeMap::from([("recipe".to_string(), "test".to_string())]);
        Checkpoint::save(folder, step, &words, &tensors).unwrap()
    }

    #[test]
    fn what_was_saved_is_read() {
        let folder = folder("round");
        assert!(Checkpoint::latest(&folder).unwrap().0.is_none());
        (1..=4).for_each(|step| drop(save(&folder, step)));
        let (latest, bad) = Checkpoint::latest(&folder).unwrap();
        let latest = latest.unwrap();
        assert_eq!((latest.step, bad.len(), list(&folder).unwrap().len()), (4, 0, KEPT));
        latest.expect("recipe", "test").unwrap();
        assert!(latest.expect("recipe", "other").is_err());
        let a = latest.tensor("a", Meta::new(DType::F32, [2]), &Device::cpu()).unwrap();
        assert_eq!(a.to_vec::<f32>().unwrap(), [4.0, 2.0]);
        assert!(latest.tensor("a", Meta::new(DType::F32, [3]), &Device::cpu()).is_err());
        assert!(latest.tensor("b", Meta::new(DType::F32, [2]), &Device::cpu()).is_err());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn damage_is_found_and_the_one_before_is_used() {
        let folder = folder("damage");
        save(&folder, 1);
        let newest = save(&folder, 2);
        let bytes = fs::read(&newest).unwrap();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 4;
            fs::write(&newest, &changed).unwrap();
            let (latest, bad) = Checkpoint::latest(&folder).unwrap();
            assert_eq!((latest.map(|c| c.step), bad.len()), (Some(1), 1), "byte {at}");
        }
        for end in 0..bytes.len() {
            fs::write(&newest, &bytes[..end]).unwrap();
            assert!(Checkpoint::read(&newest).is_err(), "cut at {end}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
