//! Pooling layers.

use crate::Module;
use crate::layer::layers;
use crate::module::note;
use kiln_tensor::{Extents, PoolOptions, Scope, Tensor};

macro_rules! pools {
    ($($(#[$doc:meta])* $name:ident $alias1:ident $alias2:ident $alias3:ident [$one:ident $two:ident $three:ident];)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Module)]
        pub struct $name<const N: usize> {
            /// The extents of a window.
            pub kernel: Extents,
            /// Stride, padding and what else there is.
            pub options: PoolOptions,
        }

        #[doc = concat!("[`", stringify!($name), "`] over `[N, C, L]`.")]
        pub type $alias1 = $name<1>;
        #[doc = concat!("[`", stringify!($name), "`] over `[N, C, H, W]`.")]
        pub type $alias2 = $name<2>;
        #[doc = concat!("[`", stringify!($name), "`] over `[N, C, D, H, W]`.")]
        pub type $alias3 = $name<3>;

        layers!($name<const N>);

        impl<const N: usize> $name<N> {
            /// A layer with windows side by side.
            pub fn new(kernel: impl Into<Extents>) -> $name<N> {
                $name { kernel: kernel.into(), options: PoolOptions::default() }
            }

            /// With this distance between windows.
            pub fn stride(self, stride: impl Into<Extents>) -> $name<N> {
                $name { options: self.options.stride(stride), ..self }
            }

            /// With this padding at both ends.
            pub fn padding(self, padding: impl Into<Extents>) -> $name<N> {
                $name { options: self.options.padding(padding), ..self }
            }

            /// With a last window that is incomplete, or without.
            pub fn ceil_mode(self, ceil_mode: bool) -> $name<N> {
                $name { options: self.options.ceil_mode(ceil_mode), ..self }
            }

            /// The layer's result for `x`, of shape `[batch, channels, ..]` or `[channels, ..]`.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Tensor {
                let _scope = Scope::enter([stringify!($one), stringify!($two), stringify!($three)][N - 1]);
                note(self, match N {
                    1 => x.$one(self.kernel, self.options),
                    2 => x.$two(self.kernel, self.options),
                    _ => x.$three(self.kernel, self.options),
                })
            }
        }
    )*};
}
pools! {
    /// The largest number of each window.
    ///
    /// ```
    /// use kiln_nn::MaxPool2d;
    /// # use kiln_tensor::{Device, Tensor};
    /// let layer = MaxPool2d::new(3).stride(2).padding(1);
    /// assert_eq!(layer.forward(&Tensor::ones([1, 4, 8, 8], &Device::cpu())).shape()[..], [1, 4, 4, 4]);
    /// ```
    MaxPool MaxPool1d MaxPool2d MaxPool3d [max_pool1d max_pool2d max_pool3d];
    /// The mean of each window.
    ///
    /// ```
    /// use kiln_nn::AvgPool1d;
    /// # use kiln_tensor::{Device, Tensor};
    /// let x = Tensor::from_vec(vec![1.0f32, 3.0, 5.0, 7.0], [1, 1, 4], &Device::cpu());
    /// assert_eq!(AvgPool1d::new(2).forward(&x).to_vec::<f32>()?, [2.0, 6.0]);
    /// # Ok::<(), kiln_tensor::Error>(())
    /// ```
    AvgPool AvgPool1d AvgPool2d AvgPool3d [avg_pool1d avg_pool2d avg_pool3d];
}

impl<const N: usize> MaxPool<N> {
    /// With this distance between the elements of a window.
    pub fn dilation(self, dilation: impl Into<Extents>) -> MaxPool<N> {
        MaxPool { options: self.options.dilation(dilation), ..self }
    }
}

impl<const N: usize> AvgPool<N> {
    /// With padding counted as elements, or not.
    pub fn count_include_pad(self, count: bool) -> AvgPool<N> {
        AvgPool { options: self.options.count_include_pad(count), ..self }
    }

    /// With sums divided by this number.
    pub fn divisor_override(self, divisor: usize) -> AvgPool<N> {
        AvgPool { options: self.options.divisor_override(divisor), ..self }
    }
}

macro_rules! adaptive {
    ($($(#[$doc:meta])* $name:ident $alias1:ident $alias2:ident $alias3:ident [$one:ident $two:ident $three:ident];)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Module)]
        pub struct $name<const N: usize> {
            /// The extents of the result.
            pub size: Extents,
        }

        #[doc = concat!("[`", stringify!($name), "`] over `[N, C, L]`.")]
        pub type $alias1 = $name<1>;
        #[doc = concat!("[`", stringify!($name), "`] over `[N, C, H, W]`.")]
        pub type $alias2 = $name<2>;
        #[doc = concat!("[`", stringify!($name), "`] over `[N, C, D, H, W]`.")]
        pub type $alias3 = $name<3>;

        layers!($name<const N>);

        impl<const N: usize> $name<N> {
            /// A layer whose results have these extents.
            pub fn new(size: impl Into<Extents>) -> $name<N> {
                $name { size: size.into() }
            }

            /// The layer's result for `x`, of shape `[batch, channels, ..]` or `[channels, ..]`.
            #[track_caller]
            pub fn forward(&self, x: &Tensor) -> Tensor {
                let _scope = Scope::enter([stringify!($one), stringify!($two), stringify!($three)][N - 1]);
                note(self, match N {
                    1 => x.$one(self.size),
                    2 => x.$two(self.size),
                    _ => x.$three(self.size),
                })
            }
        }
    )*};
}
adaptive! {
    /// The means of windows that cover the input so that the result has a given size.
    ///
    /// ```
    /// use kiln_nn::AdaptiveAvgPool2d;
    /// # use kiln_tensor::{Device, Tensor};
    /// let y = AdaptiveAvgPool2d::new(1).forward(&Tensor::ones([2, 4, 7, 9], &Device::cpu()));
    /// assert_eq!(y.shape()[..], [2, 4, 1, 1]);
    /// ```
    AdaptiveAvgPool AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d
        [adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d];
    /// The largest numbers of windows that cover the input so that the result has a given size.
    AdaptiveMaxPool AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d
        [adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d];
}

/// The `p`-norm of each window.
///
/// ```
/// use kiln_nn::LpPool1d;
/// # use kiln_tensor::{Device, Tensor};
/// let x = Tensor::from_vec(vec![3.0f32, 4.0, 0.0, 5.0], [1, 1, 4], &Device::cpu());
/// assert_eq!(LpPool1d::new(2.0, 2).forward(&x).to_vec::<f32>()?, [5.0, 5.0]);
/// # Ok::<(), kiln_tensor::Error>(())
/// ```
#[derive(Clone, Module)]
pub struct LpPool<const N: usize> {
    /// The power.
    pub p: f64,
    /// The extents of a window.
    pub kernel: Extents,
    /// Stride, and whether an incomplete window counts.
    pub options: PoolOptions,
}

/// [`LpPool`] over `[N, C, L]`.
pub type LpPool1d = LpPool<1>;
/// [`LpPool`] over `[N, C, H, W]`.
pub type LpPool2d = LpPool<2>;
/// [`LpPool`] over `[N, C, D, H, W]`.
pub type LpPool3d = LpPool<3>;

layers!(LpPool<const N>);

impl<const N: usize> LpPool<N> {
    /// A layer with windows side by side.
    pub fn new(p: f64, kernel: impl Into<Extents>) -> LpPool<N> {
        LpPool { p, kernel: kernel.into(), options: PoolOptions::default() }
    }

    /// With this distance between windows.
    pub fn stride(self, stride: impl Into<Extents>) -> LpPool<N> {
        LpPool { options: self.options.stride(stride), ..self }
    }

    /// With a last window that is incomplete, or without.
    pub fn ceil_mode(self, ceil_mode: bool) -> LpPool<N> {
        LpPool { options: self.options.ceil_mode(ceil_mode), ..self }
    }

    /// The layer's result for `x`, of shape `[batch, channels, ..]` or `[channels, ..]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter(["lp_pool1d", "lp_pool2d", "lp_pool3d"][N - 1]);
        let y = match N {
            1 => x.lp_pool1d(self.p, self.kernel, self.options),
            2 => x.lp_pool2d(self.p, self.kernel, self.options),
            _ => x.lp_pool3d(self.p, self.kernel, self.options),
        };
        note(self, y)
    }
}
