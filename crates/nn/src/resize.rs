//! Layers that move numbers between channels and space, and change the size of grids.

use crate::Module;
use crate::layer::{layers, misfit};
use crate::module::note;
use kiln_tensor::{Extents, Interpolate, PadMode, Scope, Shape, Tensor};

/// The spatial axes of `[N, C, ..]` brought to a size, or changed by a factor.
///
/// ```
/// use kiln_nn::Upsample;
/// use kiln_tensor::{Device, Interpolate, Tensor};
/// let x = Tensor::ones([1, 3, 4, 4], &Device::cpu());
/// assert_eq!(Upsample::by(2.0).forward(&x).shape()[..], [1, 3, 8, 8]);
/// let layer = Upsample::to([6, 10]).mode(Interpolate::Linear { align_corners: true });
/// assert_eq!(layer.forward(&x).shape()[..], [1, 3, 6, 10]);
/// ```
#[derive(Clone, Module)]
pub struct Upsample {
    /// How large, or by how much.
    pub scale: Scale,
    /// How values between grid points are made.
    pub mode: Interpolate,
}

/// How large a result of [`Upsample`] is.
#[derive(Clone, PartialEq, Debug)]
pub enum Scale {
    /// The extents of the result.
    Size(Extents),
    /// What extents are multiplied by: one number, or one for each axis.
    Factor(Vec<f64>),
}

impl Upsample {
    /// Brings extents to a size, by the nearest points.
    pub fn to(size: impl Into<Extents>) -> Upsample {
        Upsample { scale: Scale::Size(size.into()), mode: Interpolate::Nearest }
    }

    /// Multiplies extents by a factor, by the nearest points.
    pub fn by(factor: f64) -> Upsample {
        Upsample { scale: Scale::Factor(vec![factor]), mode: Interpolate::Nearest }
    }

    /// With values made in another way.
    pub fn mode(self, mode: Interpolate) -> Upsample {
        Upsample { mode, ..self }
    }

    /// The layer's result for `x`, of shape `[N, C, ..]` with one to three spatial axes.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("upsample");
        note(
            self,
            match &self.scale {
                Scale::Size(size) => x.interpolate(*size, self.mode),
                Scale::Factor(factors) => x.interpolate_by(factors, self.mode),
            },
        )
    }
}

/// `[.., C * f * f, H, W]` as `[.., C, H * f, W * f]`: channels become finer pixels.
///
/// ```
/// use kiln_nn::{PixelShuffle, PixelUnshuffle};
/// # use kiln_tensor::{Device, Tensor};
/// let x = Tensor::randn([1, 8, 3, 3], &Device::cpu());
/// let y = PixelShuffle::new(2).forward(&x);
/// assert_eq!(y.shape()[..], [1, 2, 6, 6]);
/// assert_eq!(PixelUnshuffle::new(2).forward(&y).to_vec::<f32>()?, x.to_vec::<f32>()?);
/// # Ok::<(), kiln_tensor::Error>(())
/// ```
#[derive(Clone, Copy, Module)]
pub struct PixelShuffle {
    /// How many pixels a pixel becomes along each axis.
    pub factor: usize,
}

/// The inverse of [`PixelShuffle`].
#[derive(Clone, Copy, Module)]
pub struct PixelUnshuffle {
    /// How many pixels become one along each axis.
    pub factor: usize,
}

/// The channels of `[N, C, ..]`, seen as `groups` groups, dealt out so that neighbours come from different groups.
///
/// ```
/// use kiln_nn::ChannelShuffle;
/// # use kiln_tensor::{Device, Tensor};
/// let x = Tensor::from_vec(vec![0.0f32, 1.0, 2.0, 3.0], [1, 4, 1], &Device::cpu());
/// assert_eq!(ChannelShuffle::new(2).forward(&x).to_vec::<f32>()?, [0.0, 2.0, 1.0, 3.0]);
/// # Ok::<(), kiln_tensor::Error>(())
/// ```
#[derive(Clone, Copy, Module)]
pub struct ChannelShuffle {
    /// How many groups the channels fall into.
    pub groups: usize,
}

impl PixelShuffle {
    /// For images that grow by this factor.
    pub fn new(factor: usize) -> PixelShuffle {
        PixelShuffle { factor }
    }

    /// The layer's result for `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("pixel_shuffle");
        note(self, x.pixel_shuffle(self.factor))
    }
}

impl PixelUnshuffle {
    /// For images that shrink by this factor.
    pub fn new(factor: usize) -> PixelUnshuffle {
        PixelUnshuffle { factor }
    }

    /// The layer's result for `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("pixel_unshuffle");
        note(self, x.pixel_unshuffle(self.factor))
    }
}

impl ChannelShuffle {
    /// For channels of that many groups.
    pub fn new(groups: usize) -> ChannelShuffle {
        ChannelShuffle { groups }
    }

    /// The layer's result for `x`, of shape `[N, C, ..]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("channel_shuffle");
        let (shape, groups) = (x.shape(), self.groups);
        if shape.len() < 3 || groups == 0 || !shape[1].is_multiple_of(groups) {
            misfit(
                "channel_shuffle",
                format!("the channels of shape {shape:?} do not fall into {groups} groups"),
            );
        }
        let rest: usize = shape[2..].iter().product();
        let y = x.reshape([shape[0], groups, shape[1] / groups, rest]).transpose(1, 2);
        note(self, y.reshape(shape))
    }
}

/// An axis split into several.
///
/// ```
/// use kiln_nn::Unflatten;
/// # use kiln_tensor::{Device, Tensor};
/// let y = Unflatten::new(1, [3, 4]).forward(&Tensor::ones([2, 12, 5], &Device::cpu()));
/// assert_eq!(y.shape()[..], [2, 3, 4, 5]);
/// ```
#[derive(Clone, Module)]
pub struct Unflatten {
    /// The axis.
    pub dim: isize,
    /// What it becomes.
    #[module(skip)]
    pub sizes: Shape,
}

impl Unflatten {
    /// Splits an axis into these extents.
    pub fn new(dim: isize, sizes: impl Into<Shape>) -> Unflatten {
        Unflatten { dim, sizes: sizes.into() }
    }

    /// The layer's result for `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("unflatten");
        let (shape, extent) = (x.shape(), x.dim(self.dim));
        let at = if self.dim < 0 { shape.len() as isize + self.dim } else { self.dim } as usize;
        if self.sizes.iter().product::<usize>() != extent {
            misfit("unflatten", format!("axis {} of shape {shape:?} is not {:?}", self.dim, self.sizes));
        }
        note(self, x.reshape([&shape[..at], &self.sizes[..], &shape[at + 1..]].concat()))
    }
}

/// The last axes grown at their edges. PyTorch's `ZeroPad2d`, `ReflectionPad1d`, `ConstantPad3d` and so on are its modes.
///
/// ```
/// use kiln_nn::Pad;
/// use kiln_tensor::{Device, PadMode, Tensor};
/// let x = Tensor::from_vec(vec![1.0f32, 2.0, 3.0], [1, 1, 3], &Device::cpu());
/// let y = Pad::new([2, 1], PadMode::Reflect).forward(&x);
/// assert_eq!(y.to_vec::<f32>()?, [3.0, 2.0, 1.0, 2.0, 3.0, 2.0]);
/// # Ok::<(), kiln_tensor::Error>(())
/// ```
#[doc(alias("ZeroPad2d", "ConstantPad2d", "ReflectionPad2d", "ReplicationPad2d", "CircularPad2d"))]
#[derive(Clone, Module)]
pub struct Pad {
    /// Pairs of numbers (before, after), the first pair for the last axis.
    pub pads: Vec<isize>,
    /// What stands outside.
    pub mode: PadMode,
}

impl Pad {
    /// Grows the last axes by pairs of numbers (before, after), the first pair for the last axis.
    pub fn new(pads: impl Into<Vec<isize>>, mode: PadMode) -> Pad {
        Pad { pads: pads.into(), mode }
    }

    /// The layer's result for `x`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("pad");
        note(self, x.pad(&self.pads, self.mode))
    }
}

layers!(Upsample PixelShuffle PixelUnshuffle ChannelShuffle Unflatten Pad);
