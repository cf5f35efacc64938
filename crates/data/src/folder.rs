//! Folders of images, a folder for each class, decoded when an image is asked for. Needs the feature `images`.

use crate::progress::{Progress, tell};
use crate::{DataError, Dataset, Fault, Image};
use image::{ImageReader, Limits};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The largest width and height of an image.
const MOST_SIDE: u32 = 1 << 15;
/// What decoding an image may take.
const MOST_BYTES: u64 = 512 << 20;

/// Images in a folder for each class: `cats/1.jpg`, `cats/more/2.png`, `dogs/1.jpg`. A sample is the [`Image`], three
/// channels from 0 to 1, and the place of its class in [`ImageFolder::classes`].
///
/// Files are found at once and decoded when they are asked for: PNG and JPEG, by their content. Images have sizes of
/// their own; [`Image::resize`] in a transform makes them fit into a batch. Needs the feature `images`.
///
/// ```no_run
/// use kiln_data::{DataLoader, ImageFolder};
///
/// let pets = ImageFolder::open("data/pets")?;
/// println!("{:?}", pets.classes());
/// let train = DataLoader::new(pets).batch(32).shuffle(1).workers(2).transform(|(image, class), random| {
///     (image.random_resized_crop(64, 64, random).random_flip(random), class)
/// });
/// # Ok::<(), kiln_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ImageFolder {
    classes: Vec<String>,
    files: Arc<[(PathBuf, i64)]>,
}

impl ImageFolder {
    /// Finds the images below a folder. Both classes and files are sorted by name; links are followed, except those that
    /// lead to folders below a class.
    pub fn open(folder: impl AsRef<Path>) -> Result<ImageFolder, DataError> {
        let folder = folder.as_ref();
        let (mut classes, mut files) = (Vec::new(), Vec::new());
        for path in sorted(folder)? {
            if !path.is_dir() {
                continue;
            }
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found(folder, path, classes.len() as i64, &mut files)?;
            classes.push(name);
        }
        if files.is_empty() {
            return Err(
                Fault::Missing { names: vec!["CLASS/IMAGE.jpg".into(), "CLASS/IMAGE.png".into()] }.at(folder)
            );
        }
        tell(|| progress(folder, files.len(), true));
        Ok(ImageFolder { classes, files: files.into() })
    }

    /// The names of the classes' folders.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// The file of an image, if there are so many.
    pub fn path(&self, index: usize) -> Option<&Path> {
        self.files.get(index).map(|(path, _)| path.as_path())
    }

    /// The class of an image, if there are so many, without decoding it.
    pub fn class(&self, index: usize) -> Option<i64> {
        self.files.get(index).map(|&(_, class)| class)
    }
}

impl Dataset for ImageFolder {
    type Sample = (Image, i64);

    fn len(&self) -> usize {
        self.files.len()
    }

    fn sample(&self, index: usize) -> Result<(Image, i64), DataError> {
        let (path, class) = self.files.get(index).ok_or(DataError::NoSample { len: self.files.len() })?;
        let reader = ImageReader::open(path).and_then(ImageReader::with_guessed_format);
        let image = decoded(reader.map_err(|e| Fault::from(e).at(path))?).map_err(|fault| fault.at(path))?;
        Ok((image, *class))
    }

    fn origin(&self, index: usize) -> Option<String> {
        self.path(index).map(|path| path.display().to_string())
    }
}

impl Image {
    /// Decodes the bytes of a PNG or JPEG file to three channels from 0 to 1. Needs the feature `images`.
    pub fn decode(bytes: &[u8]) -> Result<Image, DataError> {
        let reader = ImageReader::new(std::io::Cursor::new(bytes)).with_guessed_format();
        let reader = reader.map_err(|e| Fault::from(e).at("memory"))?;
        decoded(reader).map_err(|fault| fault.at("memory"))
    }
}

fn decoded(mut reader: ImageReader<impl std::io::BufRead + std::io::Seek>) -> Result<Image, Fault> {
    let mut limits = Limits::default();
    limits.max_image_width = Some(MOST_SIDE);
    limits.max_image_height = Some(MOST_SIDE);
    limits.max_alloc = Some(MOST_BYTES);
    reader.limits(limits);
    let decoded = reader.decode().map_err(|e| Fault::Image { message: e.to_string() })?.into_rgb8();
    let (width, height) = (decoded.width() as usize, decoded.height() as usize);
    let bytes = decoded.into_raw();
    let mut pixels = Vec::with_capacity(bytes.len());
    for channel in 0..3 {
        pixels.extend(bytes.iter().skip(channel).step_by(3).map(|&byte| f32::from(byte) / 255.0));
    }
    Ok(Image::new(pixels, 3, height, width))
}

/// The images at and below a path, in the order of their names.
fn found(top: &Path, folder: PathBuf, class: i64, files: &mut Vec<(PathBuf, i64)>) -> Result<(), DataError> {
    // A list instead of recursion: folders may be nested deeply. The last is the next.
    let mut left = vec![folder];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            let inside = sorted(&path)?;
            let link = |path: &PathBuf| path.is_symlink() && path.is_dir();
            left.extend(inside.into_iter().rev().filter(|path| !link(path)));
        } else if is_image(&path) {
            files.push((path, class));
            if files.len().is_multiple_of(1000) {
                tell(|| progress(top, files.len(), false));
            }
        }
    }
    Ok(())
}

fn sorted(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let entries = std::fs::read_dir(folder).and_then(|all| all.map(|entry| Ok(entry?.path())).collect());
    let mut paths: Vec<PathBuf> = entries.map_err(|e| Fault::from(e).at(folder))?;
    paths.sort();
    Ok(paths)
}

fn is_image(path: &Path) -> bool {
    let end = path.extension().map(|end| end.to_string_lossy().to_ascii_lowercase());
    end.is_some_and(|end| ["png", "jpg", "jpeg"].contains(&end.as_str()))
}

fn progress(folder: &Path, files: usize, finished: bool) -> Progress {
    Progress { path: folder.into(), done: files as u64, total: None, files: true, finished }
}
