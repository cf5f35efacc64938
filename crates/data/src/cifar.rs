//! CIFAR-10 and CIFAR-100 in their binary form: records of one or two labels and 3 by 32 by 32 bytes.

use crate::input::Input;
use crate::mnist::Held;
use crate::{DataError, Fault, LabelledImages};
use std::path::{Path, PathBuf};

const SHAPE: [usize; 3] = [3, 32, 32];
const PIXELS: usize = 3 * 32 * 32;

/// CIFAR-10 or CIFAR-100: colour images of 32 by 32, to train on and to test with.
///
/// ```no_run
/// use kiln_data::{Cifar, DataLoader};
///
/// let cifar = Cifar::open_10("data/cifar-10-batches-bin")?;
/// let train = DataLoader::new(cifar.train()).batch(128).shuffle(1).workers(2).transform(|(image, label), random| {
///     let image = image.pad(4).random_crop(32, 32, random).random_flip(random);
///     (image.normalize(&[0.491, 0.482, 0.447], &[0.247, 0.243, 0.262]), label)
/// });
/// # Ok::<(), kiln_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cifar {
    train: LabelledImages,
    test: LabelledImages,
}

/// Which labels records have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Labels {
    /// CIFAR-10: one of 10 classes.
    Ten,
    /// CIFAR-100: one of 20 coarse classes, which is passed over, then one of 100 fine ones, which is taken.
    Hundred,
}

impl Cifar {
    /// Reads CIFAR-10: `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.
    #[doc(alias("CIFAR10"))]
    pub fn open_10(folder: impl AsRef<Path>) -> Result<Cifar, DataError> {
        let train: Vec<String> = (1..=5).map(|part| format!("data_batch_{part}.bin")).collect();
        Cifar::open(folder.as_ref(), Labels::Ten, &train, "test_batch.bin")
    }

    /// Reads CIFAR-100 with its 100 fine classes: `train.bin` and `test.bin`.
    #[doc(alias("CIFAR100"))]
    pub fn open_100(folder: impl AsRef<Path>) -> Result<Cifar, DataError> {
        Cifar::open(folder.as_ref(), Labels::Hundred, &["train.bin".into()], "test.bin")
    }

    fn open(folder: &Path, labels: Labels, train: &[String], test: &str) -> Result<Cifar, DataError> {
        let paths = |names: &[String]| names.iter().map(|name| folder.join(name)).collect::<Vec<PathBuf>>();
        Ok(Cifar { train: files(&paths(train), labels)?, test: files(&paths(&[test.into()]), labels)? })
    }

    /// Reads the bytes of one such file.
    pub fn parse(bytes: &[u8], labels: Labels) -> Result<LabelledImages, DataError> {
        let mut all = Held { pixels: Vec::new(), labels: Vec::new(), shape: SHAPE, files: Vec::new() };
        records(Input::memory(bytes)?, labels, &mut all)?;
        Ok(LabelledImages::new(all))
    }

    /// The images to train on: 50,000.
    pub fn train(&self) -> LabelledImages {
        self.train.clone()
    }

    /// The images to test with: 10,000.
    pub fn test(&self) -> LabelledImages {
        self.test.clone()
    }
}

fn files(paths: &[PathBuf], labels: Labels) -> Result<LabelledImages, DataError> {
    let mut all = Held { pixels: Vec::new(), labels: Vec::new(), shape: SHAPE, files: Vec::new() };
    for path in paths {
        records(Input::open(path)?, labels, &mut all)?;
    }
    Ok(LabelledImages::new(all))
}

/// Appends the records of a file.
fn records(mut input: Input<'_>, labels: Labels, all: &mut Held) -> Result<(), DataError> {
    let (skipped, classes) = match labels {
        Labels::Ten => (0, 10),
        Labels::Hundred => (1, 100),
    };
    let record = skipped + 1 + PIXELS;
    let bytes = input.rest().map_err(|fault| fault.at(input.path()))?;
    if bytes.len() % record != 0 {
        return Err(Fault::Records { record, have: bytes.len() as u64 }.at(input.path()));
    }
    for (at, bytes) in bytes.chunks_exact(record).enumerate() {
        let label = i64::from(bytes[skipped]);
        if label >= classes as i64 {
            return Err(Fault::Label { record: at, label, classes }.at(input.path()));
        }
        all.labels.push(label);
        all.pixels.extend_from_slice(&bytes[skipped + 1..]);
    }
    all.files.push((all.labels.len(), input.path().into()));
    Ok(())
}
