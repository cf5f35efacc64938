//! Checkpoints: named tensors and words in one file, written whole or not at all.
//!
//! A checkpoint is a safetensors file whose metadata hold the job's words and the sha256 of everything. It is written
//! beside its place, brought to the disk and renamed, so that a file with the right name is complete; reading verifies
//! the sum, so that a damaged one is not taken for good.

use crate::error::StoreError;
use crate::file::TensorFile;
use crate::save;
use kiln_nn::Module;
use kiln_tensor::{Data, Device, Error, Meta, Tensor};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

const SUM: &str = "sha256";
const STEP: &str = "step";

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CheckpointError {
    /// Its file cannot be written or read, or is damaged.
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{}: not a Kiln checkpoint: its metadata have no {missing}", path.display())]
    Foreign { path: PathBuf, missing: &'static str },
    #[error("{}: it has no tensor named {name}; one of {want} is needed", path.display())]
    Missing { path: PathBuf, name: String, want: Meta },
    #[error("{}: {name}: {reason}", path.display())]
    Name { path: PathBuf, name: String, reason: &'static str },
    #[error("{}: it holds {got} where {want} is needed", path.display())]
    Other { path: PathBuf, want: String, got: String },
    #[error(transparent)]
    Device(#[from] Error),
}

/// For `map_err` of what the system refuses.
fn failed(path: &Path) -> impl Fn(std::io::Error) -> CheckpointError {
    move |source| StoreError::File { path: path.into(), source }.into()
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
    /// Writes a checkpoint into `folder`, which is made if it is missing, and deletes no other: see
    /// [`Checkpoint::prune`]. When this returns, it is on the disk. Equal checkpoints have equal bytes.
    pub fn save(
        folder: &Path,
        step: u64,
        words: &BTreeMap<String, String>,
        tensors: &[(String, Tensor)],
    ) -> Result<PathBuf, CheckpointError> {
        // All reads are asked for before the first is waited for.
        let reads: Vec<_> = tensors.iter().map(|(name, t)| (name.clone(), t.to_data_async())).collect();
        let path = folder.join(format!("step-{step:010}.safetensors"));
        let refused = |name: &str, reason| {
            Err(CheckpointError::Name { path: path.clone(), name: name.to_string(), reason })
        };
        if let Some(word) = [STEP, SUM].into_iter().find(|word| words.contains_key(*word)) {
            return refused(word, "every checkpoint has a word of that name");
        }
        let mut data = BTreeMap::new();
        for (name, read) in reads {
            if data.contains_key(&name) {
                return refused(&name, "two tensors have that name");
            }
            data.insert(name, read.wait()?);
        }
        let mut metadata = words.clone();
        metadata.insert(STEP.into(), step.to_string());
        metadata.insert(SUM.into(), sum(step, words, &data));
        fs::create_dir_all(folder).map_err(failed(folder))?;
        save::write(&path, &data, &metadata)?;
        Ok(path)
    }

    /// Makes `folder` if it is missing and tries to write there, so that a job learns before its first step what would
    /// keep it from saving.
    pub fn prepare(folder: &Path) -> Result<(), CheckpointError> {
        fs::create_dir_all(folder).map_err(failed(folder))?;
        let trial = folder.join(format!(".{}.trial.tmp", std::process::id()));
        let written = File::create(&trial).and_then(|mut file| file.write_all(b"kiln"));
        let _ = fs::remove_file(&trial);
        written.map_err(failed(folder))
    }

    /// Deletes checkpoints of the job that `words` describe, except the newest `keep` of those up to `step`. Files of
    /// other jobs, of later steps and those that cannot be read stay. Gives what it deleted.
    pub fn prune(
        folder: &Path,
        words: &BTreeMap<String, String>,
        step: u64,
        keep: usize,
    ) -> Result<Vec<PathBuf>, CheckpointError> {
        let mut own: Vec<(u64, PathBuf)> = Vec::new();
        for path in list(folder)? {
            if let Some((at, said)) = told(&path)
                && said == *words
                && at <= step
            {
                own.push((at, path));
            }
        }
        own.sort();
        own.truncate(own.len().saturating_sub(keep));
        for (_, path) in &own {
            fs::remove_file(path).map_err(failed(path))?;
        }
        Ok(own.into_iter().map(|(_, path)| path).collect())
    }

    /// The newest checkpoint of `folder` that is whole, and what was wrong with newer ones; `None` if there is none. A
    /// folder that does not exist is an error.
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
        let file = TensorFile::open(path)?;
        let mut words = file.metadata().clone();
        let foreign = |missing| CheckpointError::Foreign { path: path.into(), missing };
        let step = words.remove(STEP).and_then(|s| s.parse().ok()).ok_or_else(|| foreign("step"))?;
        let want = words.remove(SUM).ok_or_else(|| foreign("checksum"))?;
        if let Some(name) = file.unsupported().keys().next() {
            return Err(StoreError::damaged(path, format!("{name} has a foreign dtype")).into());
        }
        let mut tensors = BTreeMap::new();
        for (name, _) in file.metas() {
            tensors.insert(name.to_string(), file.data(name)?);
        }
        if sum(step, &words, &tensors) != want {
            return Err(StoreError::damaged(path, "its checksum is wrong").into());
        }
        Ok(Checkpoint { step, words, tensors, path: path.into() })
    }

    /// Whether a word is what it should be.
    pub fn expect(&self, word: &str, want: &str) -> Result<(), CheckpointError> {
        let got = match self.words.get(word) {
            Some(got) if got == want => return Ok(()),
            Some(got) => format!("{word} {got}"),
            None => format!("no {word}"),
        };
        Err(CheckpointError::Other { path: self.path.clone(), want: format!("{word} {want}"), got })
    }

    /// A tensor of this meta on a device.
    pub fn tensor(&self, name: &str, meta: Meta, device: &Device) -> Result<Tensor, CheckpointError> {
        let path = || self.path.clone();
        let Some(data) = self.tensors.get(name) else {
            return Err(CheckpointError::Missing { path: path(), name: name.into(), want: meta });
        };
        if data.meta != meta {
            let (want, got) = (format!("{name} of {meta}"), data.meta.to_string());
            return Err(CheckpointError::Other { path: path(), want, got });
        }
        Ok(device.persistent(|| Tensor::from_data(data.clone(), device)))
    }

    /// Brings every parameter and buffer of `model` to what stands here under `prefix` and its path, on its own device. Tied weights
    /// are one tensor under the first of their paths, and stay tied; what was frozen stays so. Where something is missing
    /// or has another shape, the model is left as it was.
    pub fn restore(&self, prefix: &str, model: &mut dyn Module) -> Result<(), CheckpointError> {
        let mut found = Vec::new();
        for (path, old) in model.distinct() {
            let new = self.tensor(&format!("{prefix}{path}"), old.meta(), &old.device())?;
            found.push(if old.is_leaf() { new.requires_grad() } else { new });
        }
        let mut buffers = Vec::new();
        for (path, old) in model.buffers() {
            buffers.push(self.tensor(&format!("{prefix}{path}"), old.meta(), &old.device())?);
        }
        let (mut found, mut buffers) = (found.into_iter(), buffers.into_iter());
        model.replace(&mut |_, _| found.next());
        model.visit_buffers("", &mut |_, buffer| buffers.next().into_iter().for_each(|new| buffer.load(new)));
        Ok(())
    }
}

/// The step and the words that the head of a file states, if it is a checkpoint's.
fn told(path: &Path) -> Option<(u64, BTreeMap<String, String>)> {
    let mut words = TensorFile::open(path).ok()?.metadata().clone();
    let step = words.remove(STEP)?.parse().ok()?;
    words.remove(SUM)?;
    Some((step, words))
}

/// The checkpoints of a folder, oldest first.
fn list(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let mut found = Vec::new();
    let entries = fs::read_dir(folder).map_err(failed(folder))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_tensor::DType;
    use safetensors::SafeTensors;

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
        let missing = Checkpoint::latest(&folder).unwrap_err();
        assert!(
            matches!(&missing, CheckpointError::Store(StoreError::File { path, .. }) if *path == folder),
            "{missing}"
        );
        Checkpoint::prepare(&folder).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "a trial leaves nothing");
        assert!(Checkpoint::latest(&folder).unwrap().0.is_none());
        (1..=4).for_each(|step| drop(save(&folder, step)));
        let (latest, bad) = Checkpoint::latest(&folder).unwrap();
        let latest = latest.unwrap();
        assert_eq!((latest.step, bad.len(), list(&folder).unwrap().len()), (4, 0, 4));
        latest.expect("recipe", "test").unwrap();
        assert!(latest.expect("recipe", "other").is_err());
        let a = latest.tensor("a", Meta::new(DType::F32, [2]), &Device::cpu()).unwrap();
        assert_eq!(a.to_vec::<f32>().unwrap(), [4.0, 2.0]);
        assert!(latest.tensor("a", Meta::new(DType::F32, [3]), &Device::cpu()).is_err());
        let error = latest.tensor("b", Meta::new(DType::F32, [2]), &Device::cpu()).unwrap_err();
        assert!(error.to_string().ends_with("it has no tensor named b; one of f32[2] is needed"), "{error}");
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

    fn words(recipe: &str) -> BTreeMap<String, String> {
        BTreeMap::from([("recipe".to_string(), recipe.to_string())])
    }

    #[test]
    fn a_save_deletes_nothing_and_pruning_only_what_is_older_of_the_same_job() {
        let folder = folder("kept");
        [10, 20, 30, 40].iter().for_each(|&step| drop(save(&folder, step)));
        // Another job in the same folder starts at the beginning.
        let x = [("x".to_string(), Tensor::ones([1], &Device::cpu()))];
        let other = Checkpoint::save(&folder, 5, &words("other"), &x).unwrap();
        assert!(other.exists());
        let steps = || -> Vec<u64> {
            list(&folder).unwrap().iter().map(|path| Checkpoint::read(path).unwrap().step).collect()
        };
        assert_eq!(steps(), [5, 10, 20, 30, 40]);
        fs::write(folder.join("step-0000000001.safetensors"), b"not one").unwrap();
        let gone = Checkpoint::prune(&folder, &words("test"), 30, 2).unwrap();
        assert_eq!(gone, [folder.join("step-0000000010.safetensors")]);
        fs::remove_file(folder.join("step-0000000001.safetensors")).unwrap();
        assert_eq!(steps(), [5, 20, 30, 40], "40 is later than the step asked for");
        // A run that begins again below what an earlier one left keeps what it has just written.
        let newest = save(&folder, 15);
        Checkpoint::prune(&folder, &words("test"), 15, 1).unwrap();
        assert!(newest.exists());
        assert_eq!(steps(), [5, 15, 20, 30, 40]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn equal_checkpoints_have_equal_bytes() {
        let (one, two) = (folder("equal-1"), folder("equal-2"));
        let device = Device::cpu();
        let words: BTreeMap<_, _> = (0..20).map(|i| (format!("word {i}"), i.to_string())).collect();
        let tensors: Vec<_> = (0..20)
            .map(|i| {
                let dtype = [DType::F32, DType::I64, DType::U8, DType::BF16][i % 4];
                (format!("tensor {i}"), Tensor::full([i], i, dtype, &device))
            })
            .collect();
        let reversed: Vec<_> = tensors.iter().rev().cloned().collect();
        let first = fs::read(Checkpoint::save(&one, 3, &words, &tensors).unwrap()).unwrap();
        let second = fs::read(Checkpoint::save(&two, 3, &words, &reversed).unwrap()).unwrap();
        assert!(first == second);
        // Others read it too.
        let file = SafeTensors::deserialize(&first).unwrap();
        assert_eq!(file.tensor("tensor 5").unwrap().shape(), [5]);
        [one, two].iter().for_each(|folder| fs::remove_dir_all(folder).unwrap());
    }

    #[test]
    fn foreign_files_and_hostile_shapes_are_typed_errors() {
        let folder = folder("foreign");
        fs::create_dir_all(&folder).unwrap();
        let write = |head: &str, data: &[u8]| {
            let path = folder.join("step-0000000001.safetensors");
            let bytes = [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), data].concat();
            fs::write(&path, bytes).unwrap();
            path
        };
        let part = |shape: &str| format!(r#""a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,4]}}"#);
        let foreign = Checkpoint::read(&write(&format!("{{{}}}", part("[1]")), &[0; 4])).unwrap_err();
        assert!(matches!(foreign, CheckpointError::Foreign { missing: "step", .. }), "{foreign}");
        assert!(foreign.to_string().contains("not a Kiln checkpoint"), "{foreign}");
        for shape in ["[1,1,1,1,1,1,1,1,1]", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"] {
            let head = format!(r#"{{"__metadata__":{{"step":"1","sha256":"x"}},{}}}"#, part(shape));
            let deep = Checkpoint::read(&write(&head, &[0; 4])).unwrap_err();
            let CheckpointError::Store(StoreError::Damaged { reason, .. }) = &deep else { panic!("{deep}") };
            assert!(reason.contains("rank"), "{reason}");
        }
        let x = || Tensor::ones([1], &Device::cpu());
        let twice = [("x".to_string(), x()), ("x".to_string(), x())];
        assert!(matches!(
            Checkpoint::save(&folder, 1, &words("w"), &twice),
            Err(CheckpointError::Name { .. })
        ));
        let own = BTreeMap::from([("step".to_string(), "9".to_string())]);
        assert!(matches!(Checkpoint::save(&folder, 1, &own, &twice[..1]), Err(CheckpointError::Name { .. })));
        fs::remove_dir_all(&folder).unwrap();
    }
}
