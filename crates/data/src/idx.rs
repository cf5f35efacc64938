//! IDX files, the form of MNIST and its kin: numbers of one type in a few axes.

use crate::input::Input;
use crate::{DataError, Fault, Rows};
use kiln_tensor::{Bytes, DType, Data, MAX_RANK, Meta, Shape};
use std::io::Read;
use std::path::Path;

/// The content of an IDX file, plain or gzip.
///
/// ```
/// use kiln_data::Idx;
/// use kiln_tensor::DType;
///
/// // Unsigned bytes (8) in one axis of three.
/// let file = [0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1];
/// let idx = Idx::parse(&file)?;
/// assert_eq!((idx.dtype(), idx.shape(), idx.bytes()), (DType::U8, [3].into(), &[7, 2, 1][..]));
/// # Ok::<(), kiln_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Idx {
    data: Data,
}

impl Idx {
    /// Reads a file.
    pub fn open(path: impl AsRef<Path>) -> Result<Idx, DataError> {
        Idx::read(Input::open(path.as_ref())?)
    }

    /// Reads bytes.
    pub fn parse(bytes: &[u8]) -> Result<Idx, DataError> {
        Idx::read(Input::memory(bytes)?)
    }

    fn read(mut input: Input<'_>) -> Result<Idx, DataError> {
        let data = content(&mut input).map_err(|fault| fault.at(input.path()))?;
        Ok(Idx { data })
    }

    /// The type of its numbers.
    pub fn dtype(&self) -> DType {
        self.data.meta.dtype
    }

    /// Its extents.
    pub fn shape(&self) -> Shape {
        self.data.meta.shape
    }

    /// Its numbers, row-major and little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.data.bytes
    }

    /// Its numbers, to make a tensor of.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The data set whose samples lie along the first axis.
    ///
    /// # Panics
    /// If it has no axis.
    #[track_caller]
    pub fn rows(&self) -> Rows {
        assert!(!self.shape().is_empty(), "rows: an IDX file of one number has none");
        Rows::from_data(self.data.clone())
    }
}

fn content(input: &mut Input<'_>) -> Result<Data, Fault> {
    let mut magic = Vec::new();
    input.by_ref().take(4).read_to_end(&mut magic)?;
    let (dtype, rank) = match magic[..] {
        [0, 0, code, rank] if usize::from(rank) <= MAX_RANK => (dtype(code), usize::from(rank)),
        _ => (None, 0),
    };
    let Some(dtype) = dtype else {
        return Err(Fault::Magic { format: "IDX file", found: magic });
    };
    let mut head = vec![0; 4 * rank];
    input.read_exact(&mut head)?;
    let extents: Vec<u32> =
        head.chunks_exact(4).map(|word| u32::from_be_bytes([word[0], word[1], word[2], word[3]])).collect();
    let meta = meta(dtype, &extents)
        .ok_or_else(|| Fault::Extents { extents: extents.iter().map(|&extent| extent.into()).collect() })?;
    let mut bytes = input.content(meta.bytes() as u64)?;
    if dtype.size() > 1 {
        bytes.chunks_exact_mut(dtype.size()).for_each(<[u8]>::reverse);
    }
    Ok(Data::new(meta, Bytes::new(bytes)))
}

fn meta(dtype: DType, extents: &[u32]) -> Option<Meta> {
    let mut shape = Shape::default();
    for &extent in extents {
        shape = shape.inserted(shape.len(), usize::try_from(extent).ok()?)?;
    }
    let meta = Meta { dtype, shape };
    meta.check().ok().map(|()| meta)
}

fn dtype(code: u8) -> Option<DType> {
    Some(match code {
        0x08 => DType::U8,
        0x09 => DType::I8,
        0x0B => DType::I16,
        0x0C => DType::I32,
        0x0D => DType::F32,
        0x0E => DType::F64,
        _ => return None,
    })
}
