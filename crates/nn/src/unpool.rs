//! Pools that are undone, and pools at random places.

use crate::Module;
use crate::layer::layers;
use crate::module::note;
use kiln_tensor::{Extents, Scope, Tensor};

/// What [`crate::MaxPool`] with indices gave, put back where it was taken from, among zeros.
///
/// ```
/// use kiln_nn::MaxUnpool2d;
/// # use kiln_tensor::{Device, PoolOptions, Tensor};
/// let x = Tensor::randn([1, 2, 4, 4], &Device::cpu());
/// let (y, indices) = x.max_pool2d_with_indices(2, PoolOptions::default());
/// assert_eq!(MaxUnpool2d::new(2).forward(&y, &indices).shape(), x.shape());
/// ```
#[derive(Clone, Module)]
pub struct MaxUnpool<const N: usize> {
    /// The extents of a window.
    pub kernel: Extents,
    /// The distance between windows.
    pub stride: Extents,
    /// The padding at both ends.
    pub padding: Extents,
}

/// [`MaxUnpool`] over `[N, C, L]`.
pub type MaxUnpool1d = MaxUnpool<1>;
/// [`MaxUnpool`] over `[N, C, H, W]`.
pub type MaxUnpool2d = MaxUnpool<2>;
/// [`MaxUnpool`] over `[N, C, D, H, W]`.
pub type MaxUnpool3d = MaxUnpool<3>;

impl<const N: usize> MaxUnpool<N> {
    const NAME: &'static str = ["max_unpool1d", "max_unpool2d", "max_unpool3d"][N - 1];

    /// A layer for windows side by side.
    pub fn new(kernel: impl Into<Extents>) -> MaxUnpool<N> {
        let kernel = kernel.into();
        MaxUnpool { kernel, stride: kernel, padding: Extents::from(0) }
    }

    /// For windows at this distance.
    pub fn stride(self, stride: impl Into<Extents>) -> MaxUnpool<N> {
        MaxUnpool { stride: stride.into(), ..self }
    }

    /// For an input that was padded at both ends.
    pub fn padding(self, padding: impl Into<Extents>) -> MaxUnpool<N> {
        MaxUnpool { padding: padding.into(), ..self }
    }

    /// The least input that the pool makes such a result of, filled from `x` by `indices`.
    ///
    /// # Panics
    /// If the kernel, stride or padding does not fit that many axes, or the padding leaves nothing.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, indices: &Tensor) -> Tensor {
        let given = [self.kernel, self.stride, self.padding].map(|extents| extents.over(N));
        let [Some(kernel), Some(stride), Some(padding)] = given else {
            panic!("{}: kernel, stride and padding are for {N} spatial axes", Self::NAME)
        };
        let shape = x.shape();
        if shape.len() != N + 1 && shape.len() != N + 2 {
            panic!("{}: shape {shape:?} does not have {N} spatial axes", Self::NAME);
        }
        let mut size = Vec::new();
        for (i, &extent) in shape[shape.len() - N..].iter().enumerate() {
            let whole = extent.saturating_sub(1) * stride[i] + kernel[i];
            match whole.checked_sub(2 * padding[i]) {
                Some(length) => size.push(length),
                None => panic!("{}: a padding of {} leaves nothing of {whole}", Self::NAME, padding[i]),
            }
        }
        self.forward_to(x, indices, Extents::from(&size[..]))
    }

    /// Like [`MaxUnpool::forward`], for an input of this size: several give the same result.
    #[doc(alias("output_size"))]
    #[track_caller]
    pub fn forward_to(&self, x: &Tensor, indices: &Tensor, size: impl Into<Extents>) -> Tensor {
        let _scope = Scope::enter(Self::NAME);
        let y = match N {
            1 => x.max_unpool1d(indices, size),
            2 => x.max_unpool2d(indices, size),
            _ => x.max_unpool3d(indices, size),
        };
        note(self, y)
    }
}

/// The largest numbers of windows that lie at random, so that the result has a given size. Where they lie comes from the
/// thread's generator, in evaluation too.
///
/// ```
/// use kiln_nn::FractionalMaxPool2d;
/// # use kiln_tensor::{Device, Tensor};
/// let y = FractionalMaxPool2d::new(2, [5, 4]).forward(&Tensor::randn([2, 3, 9, 7], &Device::cpu()));
/// assert_eq!(y.shape()[..], [2, 3, 5, 4]);
/// ```
#[derive(Clone, Module)]
pub struct FractionalMaxPool<const N: usize> {
    /// The extents of a window.
    pub kernel: Extents,
    /// The extents of the result.
    pub size: Extents,
}

/// [`FractionalMaxPool`] over `[N, C, H, W]`.
pub type FractionalMaxPool2d = FractionalMaxPool<2>;
/// [`FractionalMaxPool`] over `[N, C, D, H, W]`.
pub type FractionalMaxPool3d = FractionalMaxPool<3>;

layers!(FractionalMaxPool<const N>);

impl<const N: usize> FractionalMaxPool<N> {
    /// A layer whose results have these extents.
    pub fn new(kernel: impl Into<Extents>, size: impl Into<Extents>) -> FractionalMaxPool<N> {
        const { assert!(N == 2 || N == 3, "windows lie at random over two or three axes") };
        FractionalMaxPool { kernel: kernel.into(), size: size.into() }
    }

    /// The layer's result for `x`, of shape `[batch, channels, ..]` or `[channels, ..]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter(["fractional_max_pool2d", "fractional_max_pool3d"][N - 2]);
        let (y, _) = match N {
            2 => x.fractional_max_pool2d(self.kernel, self.size),
            _ => x.fractional_max_pool3d(self.kernel, self.size),
        };
        note(self, y)
    }
}
