//! Tensors from nothing and from host memory.

use crate::{DType, Data, Device, Element, Number, Shape, Tensor};
use kiln_device::{Bytes, method};
use kiln_ir::{Meta, Op, Scalar};

/// # Tensors from nothing and from host memory
impl Tensor {
    /// A tensor of these elements in row-major order.
    ///
    /// # Panics
    /// If the shape has another number of elements.
    #[doc(alias("tensor", "from_numpy"))]
    #[track_caller]
    pub fn from_vec<T: Element>(items: Vec<T>, shape: impl Into<Shape>, device: &Device) -> Tensor {
        let shape = shape.into();
        let meta = Meta { dtype: T::DTYPE, shape };
        if let Err(e) = meta.check() {
            panic!("from_vec: {e}");
        }
        assert!(
            shape.numel() == items.len(),
            "from_vec: {} elements do not fill shape {shape:?}",
            items.len()
        );
        Tensor::from_data(Data::new(meta, Bytes::new(T::into_bytes(items))), device)
    }

    /// A tensor of these elements in row-major order.
    ///
    /// # Panics
    /// If the shape has another number of elements.
    #[doc(alias("tensor", "from_numpy"))]
    #[track_caller]
    pub fn from_slice<T: Element>(items: &[T], shape: impl Into<Shape>, device: &Device) -> Tensor {
        Tensor::from_vec(items.to_vec(), shape, device)
    }

    /// A tensor of rank 0.
    pub fn scalar<T: Element>(item: T, device: &Device) -> Tensor {
        Tensor::from_vec(vec![item], [], device)
    }

    /// A tensor of one value, of any plain dtype.
    #[track_caller]
    pub fn full(shape: impl Into<Shape>, value: impl Into<Number>, dtype: DType, device: &Device) -> Tensor {
        let value = value.into().scalar(dtype);
        Tensor::create(Op::Full { shape: shape.into(), value }, device)
    }

    /// Zeros, f32.
    #[track_caller]
    pub fn zeros(shape: impl Into<Shape>, device: &Device) -> Tensor {
        let _method = method("zeros");
        Tensor::full(shape, 0.0, DType::F32, device)
    }

    /// Ones, f32.
    #[track_caller]
    pub fn ones(shape: impl Into<Shape>, device: &Device) -> Tensor {
        let _method = method("ones");
        Tensor::full(shape, 1.0, DType::F32, device)
    }

    /// One value, in this tensor's shape, dtype and device.
    #[track_caller]
    pub fn full_like(&self, value: impl Into<Number>) -> Tensor {
        let _method = method("full_like");
        let value: Scalar = value.into().scalar(self.dtype());
        Tensor::create(Op::Full { shape: self.shape(), value }, self.value.device())
    }

    /// Zeros, in this tensor's shape, dtype and device.
    #[track_caller]
    pub fn zeros_like(&self) -> Tensor {
        let _method = method("zeros_like");
        self.full_like(0)
    }

    /// Ones, in this tensor's shape, dtype and device.
    #[track_caller]
    pub fn ones_like(&self) -> Tensor {
        let _method = method("ones_like");
        self.full_like(1)
    }

    /// `start`, `start + step`, … below `end`: i64 if all three are integers, else f32.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let device = Device::cpu();
    /// assert_eq!(Tensor::arange(0, 6, 2, &device).to_vec::<i64>()?, [0, 2, 4]);
    /// assert_eq!(Tensor::arange(1, 2, 0.5, &device).to_vec::<f32>()?, [1.0, 1.5]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Panics
    /// If `step` is 0, or one of them is not finite.
    #[doc(alias("range"))]
    #[track_caller]
    pub fn arange(
        start: impl Into<Number>,
        end: impl Into<Number>,
        step: impl Into<Number>,
        device: &Device,
    ) -> Tensor {
        let _method = method("arange");
        let (start, end, step) = (start.into(), end.into(), step.into());
        let (Number::Int(start), Number::Int(end), Number::Int(step)) = (start, end, step) else {
            return real_range(start.to_f64(), end.to_f64(), step.to_f64(), device);
        };
        assert!(step != 0, "arange: the step is 0");
        let span = end as i128 - start as i128;
        let count = if (span > 0) == (step > 0) {
            (span.unsigned_abs()).div_ceil(step.unsigned_abs() as u128)
        } else {
            0
        };
        let index = Tensor::iota(count.min(usize::MAX as u128) as usize, DType::I64, device);
        match (start, step) {
            (0, 1) => index,
            (start, 1) => index + start,
            (start, step) => index * step + start,
        }
    }

    /// `count` evenly spaced numbers from `start` to `end`, both included, f32.
    #[track_caller]
    pub fn linspace(start: f64, end: f64, count: usize, device: &Device) -> Tensor {
        let _method = method("linspace");
        let index = Tensor::iota(count, DType::F64, device);
        let step = if count > 1 { (end - start) / (count - 1) as f64 } else { 0.0 };
        // The second half is counted from the end, so that both ends are exact.
        let (up, down) = (&index * step + start, (&index * -1.0 + (count as f64 - 1.0)) * -step + end);
        index.lt((count / 2) as f64).where_(&up, &down).to_dtype(DType::F32)
    }

    /// `count` numbers whose logarithms to `base` are evenly spaced from `start` to `end`, f32.
    #[track_caller]
    pub fn logspace(start: f64, end: f64, count: usize, base: f64, device: &Device) -> Tensor {
        let _method = method("logspace");
        let exponents = Tensor::linspace(start, end, count, device).to_dtype(DType::F64);
        exponents.constant(base).pow(&exponents).to_dtype(DType::F32)
    }

    /// The identity matrix, f32.
    #[track_caller]
    pub fn eye(n: usize, device: &Device) -> Tensor {
        let _method = method("eye");
        let [row, column] =
            [0, 1].map(|axis| Op::Iota { shape: Shape::from([n, n]), dtype: DType::I64, axis });
        Tensor::create(row, device).eq(Tensor::create(column, device)).to_dtype(DType::F32)
    }

    #[track_caller]
    fn iota(count: usize, dtype: DType, device: &Device) -> Tensor {
        Tensor::create(Op::Iota { shape: Shape::from([count]), dtype, axis: 0 }, device)
    }
}

/// Each number is computed from its place in f64 and rounded once.
#[track_caller]
fn real_range(start: f64, end: f64, step: f64, device: &Device) -> Tensor {
    assert!(step != 0.0, "arange: the step is 0");
    let count = ((end - start) / step).ceil();
    assert!(count.is_finite(), "arange: from {start} to {end} by {step} is not finite");
    let index = Tensor::iota(count.max(0.0) as usize, DType::F64, device);
    (index * step + start).to_dtype(DType::F32)
}
