//! MNIST and the sets in its form: four IDX files in a folder.

use crate::{DataError, Dataset, Fault, Idx, Image};
use kiln_tensor::DType;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// MNIST, Fashion-MNIST, KMNIST, or any other set of four such files: images to train on and to test with.
///
/// The folder holds `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
/// `t10k-labels-idx1-ubyte`, each plain or with `.gz`; `train-images.idx3-ubyte` is understood too. Nothing is
/// downloaded.
///
/// ```no_run
/// use kiln_data::{DataLoader, Mnist};
///
/// let mnist = Mnist::open("data/mnist")?;
/// let train = DataLoader::new(mnist.train()).batch(128).shuffle(1);
/// # Ok::<(), kiln_data::DataError>(())
/// ```
#[doc(alias("FashionMNIST", "KMNIST", "EMNIST"))]
#[derive(Clone, Debug)]
pub struct Mnist {
    train: LabelledImages,
    test: LabelledImages,
}

/// Images with a class each, held as bytes in memory. A sample is an [`Image`] with pixels from 0 to 1, and its class.
#[derive(Clone, Debug)]
pub struct LabelledImages(Arc<Held>);

#[derive(Debug)]
pub(crate) struct Held {
    /// By channel, row and column, one image after the other.
    pub pixels: Vec<u8>,
    pub labels: Vec<i64>,
    pub shape: [usize; 3],
    /// Names for errors: the images up to a number come from a file.
    pub files: Vec<(usize, PathBuf)>,
}

impl Mnist {
    /// Reads the four files of a folder.
    pub fn open(folder: impl AsRef<Path>) -> Result<Mnist, DataError> {
        let folder = folder.as_ref();
        Ok(Mnist { train: part(folder, "train")?, test: part(folder, "t10k")? })
    }

    /// The images to train on: 60,000 in the sets named above.
    pub fn train(&self) -> LabelledImages {
        self.train.clone()
    }

    /// The images to test with: 10,000 in the sets named above.
    pub fn test(&self) -> LabelledImages {
        self.test.clone()
    }
}

impl LabelledImages {
    pub(crate) fn new(held: Held) -> LabelledImages {
        LabelledImages(Arc::new(held))
    }

    /// The pixels of an image as they are in the file, by channel, row and column.
    ///
    /// # Panics
    /// If it is not there.
    #[track_caller]
    pub fn pixels(&self, index: usize) -> &[u8] {
        assert!(index < self.0.labels.len(), "image {index} of {}", self.0.labels.len());
        let size = self.0.shape.iter().product::<usize>();
        &self.0.pixels[index * size..][..size]
    }

    /// The class of each image.
    pub fn labels(&self) -> &[i64] {
        &self.0.labels
    }
}

impl Dataset for LabelledImages {
    type Sample = (Image, i64);

    fn len(&self) -> usize {
        self.0.labels.len()
    }

    fn sample(&self, index: usize) -> Result<(Image, i64), DataError> {
        let &label = self.0.labels.get(index).ok_or(DataError::NoSample { len: self.0.labels.len() })?;
        let [channels, height, width] = self.0.shape;
        Ok((Image::from_bytes(self.pixels(index), channels, height, width), label))
    }

    fn origin(&self, index: usize) -> Option<String> {
        let file = self.0.files.iter().position(|(end, _)| index < *end)?;
        let first = file.checked_sub(1).map_or(0, |before| self.0.files[before].0);
        Some(format!("image {} of {}", index - first, self.0.files[file].1.display()))
    }
}

fn part(folder: &Path, part: &str) -> Result<LabelledImages, DataError> {
    let path = found(folder, &format!("{part}-images"), "idx3-ubyte")?;
    let images = Idx::open(&path)?;
    let content = |idx: &Idx, want: &'static str| Fault::Content {
        found: idx.dtype(),
        extents: idx.shape().to_vec(),
        want,
    };
    let (DType::U8, &[count, height, width]) = (images.dtype(), &images.shape()[..]) else {
        return Err(content(&images, "bytes with three axes").at(&path));
    };
    let label_path = found(folder, &format!("{part}-labels"), "idx1-ubyte")?;
    let labels = Idx::open(&label_path)?;
    match (labels.dtype(), &labels.shape()[..]) {
        (DType::U8, &[found]) if found == count => {}
        (DType::U8, &[found]) => return Err(Fault::Labels { want: count, found }.at(&label_path)),
        _ => return Err(content(&labels, "bytes with one axis").at(&label_path)),
    }
    Ok(LabelledImages::new(Held {
        pixels: images.bytes().to_vec(),
        labels: labels.bytes().iter().map(|&label| label.into()).collect(),
        shape: [1, height, width],
        files: vec![(count, path)],
    }))
}

/// The file of a folder that has one of the usual names.
fn found(folder: &Path, stem: &str, kind: &str) -> Result<PathBuf, DataError> {
    let plain = [format!("{stem}-{kind}"), format!("{stem}.{kind}")];
    let names: Vec<String> = plain.iter().flat_map(|name| [name.clone(), format!("{name}.gz")]).collect();
    let there = names.iter().map(|name| folder.join(name)).find(|path| path.is_file());
    there.ok_or_else(|| Fault::Missing { names }.at(folder))
}
