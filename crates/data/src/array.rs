//! Arrays on the host, as samples: [`Array`] of any element, and the rows of a tensor.

use crate::{DataError, Dataset};
use kiln_tensor::{Data, Element, Meta, Shape, Tensor};

/// Elements with a shape, on the host: a sample whose batch is a tensor of one axis more.
///
/// ```
/// use kiln_data::Array;
///
/// let a = Array::new(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2]);
/// assert_eq!(a.shape(), [2, 2].into());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Array<T> {
    shape: Shape,
    items: Vec<T>,
}

impl<T: Element> Array<T> {
    /// Elements in row-major order.
    ///
    /// # Panics
    /// If the shape has another number of elements.
    #[track_caller]
    pub fn new(items: Vec<T>, shape: impl Into<Shape>) -> Array<T> {
        let (shape, len) = (shape.into(), items.len());
        assert!(shape.checked_numel() == Some(len), "Array: {len} elements do not fill shape {shape:?}");
        Array { shape, items }
    }

    /// Its extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Its elements in row-major order.
    pub fn items(&self) -> &[T] {
        &self.items
    }

    /// Its elements, to be changed.
    pub fn items_mut(&mut self) -> &mut [T] {
        &mut self.items
    }

    pub(crate) fn into_parts(self) -> (Shape, Vec<T>) {
        (self.shape, self.items)
    }
}

/// A tensor as a data set: its first axis counts the samples. Several become one set by [`Dataset::zip`].
///
/// ```
/// use kiln_data::{DataLoader, Dataset, Rows};
/// use kiln_tensor::{Device, Tensor};
///
/// let device = Device::cpu();
/// let x = Tensor::arange(0, 12, 1, &device).reshape([6, 2]);
/// let y = Tensor::arange(0, 6, 1, &device);
/// let loader = DataLoader::new(Rows::of(&x)?.zip(Rows::of(&y)?)).batch(4);
/// let (x, y) = loader.on(&device).next().unwrap()?;
/// assert_eq!((x.shape(), y.to_vec::<i64>()?), ([4, 2].into(), vec![0, 1, 2, 3]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(alias("TensorDataset"))]
#[derive(Clone, Debug)]
pub struct Rows {
    data: Data,
    row: Meta,
    len: usize,
}

impl Rows {
    /// The rows of a tensor, which is read once, now.
    ///
    /// # Panics
    /// If it has no axis, or is quantised.
    #[track_caller]
    pub fn of(tensor: &Tensor) -> Result<Rows, kiln_tensor::Error> {
        assert!(tensor.rank() > 0, "Rows: a tensor of rank 0 has no rows");
        assert!(tensor.dtype().block().0 == 1, "Rows: {} has no rows that can be cut out", tensor.meta());
        Ok(Rows::from_data(tensor.to_data()?))
    }

    /// The rows of a value that has at least one axis and is not quantised.
    pub(crate) fn from_data(data: Data) -> Rows {
        let row = Meta { dtype: data.meta.dtype, shape: data.meta.shape.removed(0) };
        let len = data.meta.shape[0];
        Rows { data, row, len }
    }
}

impl Dataset for Rows {
    type Sample = Data;

    fn len(&self) -> usize {
        self.len
    }

    fn sample(&self, index: usize) -> Result<Data, DataError> {
        if index >= self.len {
            return Err(DataError::NoSample { len: self.len });
        }
        let size = self.row.bytes();
        Ok(Data::new(self.row, self.data.bytes.slice(index * size..(index + 1) * size)))
    }
}
