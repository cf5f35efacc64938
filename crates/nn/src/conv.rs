//! Convolutional layers over one to three spatial axes, and their transposes.

use crate::Module;
use crate::init::uniform;
use crate::layer::{channels, layers, misfit};
use crate::module::note;
use kiln_tensor::{ConvOptions, Device, Extents, PadMode, Padding, Scope, Tensor};

/// A convolution over `N` spatial axes of `[batch, inputs, ..]`, and a bias for each output channel.
///
/// ```
/// use kiln_nn::{Conv1d, Conv2d};
/// use kiln_tensor::{Device, PadMode, Padding, Tensor};
///
/// let device = Device::cpu();
/// let layer = Conv2d::new(3, 8, [3, 5], &device).stride(2).padding([1, 2]);
/// assert_eq!(layer.forward(&Tensor::ones([4, 3, 10, 10], &device)).shape()[..], [4, 8, 5, 5]);
/// let depthwise = Conv1d::new(6, 6, 3, &device).groups(6).padding(Padding::Same).padding_mode(PadMode::Circular);
/// assert_eq!(depthwise.forward(&Tensor::ones([4, 6, 10], &device)).shape()[..], [4, 6, 10]);
/// ```
#[derive(Clone, Module)]
pub struct Conv<const N: usize> {
    /// `[outputs, inputs / groups, kernel..]`.
    pub weight: Tensor,
    /// `[outputs]`.
    pub bias: Option<Tensor>,
    /// Stride, padding, dilation and groups.
    pub options: ConvOptions,
    /// What stands in the padding.
    pub padding_mode: PadMode,
}

/// A convolution of `[N, C, L]`.
pub type Conv1d = Conv<1>;
/// A convolution of `[N, C, H, W]`.
pub type Conv2d = Conv<2>;
/// A convolution of `[N, C, D, H, W]`.
pub type Conv3d = Conv<3>;

/// The transpose of a [`Conv`]: what enlarges where that one reduces.
///
/// ```
/// use kiln_nn::ConvTranspose2d;
/// use kiln_tensor::{Device, Tensor};
///
/// let device = Device::cpu();
/// let layer = ConvTranspose2d::new(8, 3, 3, &device).stride(2).padding(1).output_padding(1);
/// assert_eq!(layer.forward(&Tensor::ones([4, 8, 5, 5], &device)).shape()[..], [4, 3, 10, 10]);
/// ```
#[derive(Clone, Module)]
pub struct ConvTranspose<const N: usize> {
    /// `[inputs, outputs / groups, kernel..]`.
    pub weight: Tensor,
    /// `[outputs]`.
    pub bias: Option<Tensor>,
    /// Stride, padding, dilation, groups and output padding.
    pub options: ConvOptions,
}

/// A transposed convolution of `[N, C, L]`.
pub type ConvTranspose1d = ConvTranspose<1>;
/// A transposed convolution of `[N, C, H, W]`.
pub type ConvTranspose2d = ConvTranspose<2>;
/// A transposed convolution of `[N, C, D, H, W]`.
pub type ConvTranspose3d = ConvTranspose<3>;

layers!(Conv<const N> ConvTranspose<const N>);

macro_rules! geometry {
    ($type:ident $names:expr) => {
        impl<const N: usize> $type<N> {
            const NAME: &'static str = {
                assert!(N >= 1 && N <= 3, "convolutions have one to three spatial axes");
                $names[N - 1]
            };

            /// A layer with weight and bias uniform within ±1/√n, n being the numbers that PyTorch counts for one result.
            #[track_caller]
            pub fn new(
                inputs: usize,
                outputs: usize,
                kernel: impl Into<Extents>,
                device: &Device,
            ) -> $type<N> {
                let Some(kernel) = kernel.into().over(N) else {
                    panic!("{}: a kernel has one number, or {N}", Self::NAME)
                };
                $type::drawn(inputs, outputs, &kernel, 1, true, device)
            }

            /// With this distance between windows: one number, or one for each axis.
            pub fn stride(mut self, stride: impl Into<Extents>) -> $type<N> {
                self.options = self.options.stride(stride);
                self
            }

            /// With this padding: one number, or one for each axis.
            pub fn padding(mut self, padding: impl Into<Padding>) -> $type<N> {
                self.options = self.options.padding(padding);
                self
            }

            /// With this distance between the taps of a window.
            pub fn dilation(mut self, dilation: impl Into<Extents>) -> $type<N> {
                self.options = self.options.dilation(dilation);
                self
            }

            /// With channels that fall into this many groups, convolved apart. Weight and bias are drawn anew.
            ///
            /// # Panics
            /// If the channels do not fall into that many groups.
            #[track_caller]
            pub fn groups(mut self, groups: usize) -> $type<N> {
                let (inputs, outputs) = self.channels();
                let kernel = &self.weight.shape()[2..];
                let (bias, device) = (self.bias.is_some(), self.weight.device());
                let drawn = $type::<N>::drawn(inputs, outputs, kernel, groups, bias, &device);
                (self.weight, self.bias, self.options.groups) = (drawn.weight, drawn.bias, groups);
                self
            }

            /// The layer without its bias.
            pub fn without_bias(mut self) -> $type<N> {
                self.bias = None;
                self
            }

            #[track_caller]
            fn fits(inputs: usize, outputs: usize, groups: usize) {
                if groups == 0 || !inputs.is_multiple_of(groups) || !outputs.is_multiple_of(groups) {
                    let what = format!("{inputs} and {outputs} channels do not fall into {groups} groups");
                    misfit(Self::NAME, what);
                }
            }
        }
    };
}
geometry!(Conv ["conv1d", "conv2d", "conv3d"]);
geometry!(ConvTranspose ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]);

impl<const N: usize> Conv<N> {
    #[track_caller]
    fn drawn(
        inputs: usize,
        outputs: usize,
        kernel: &[usize],
        groups: usize,
        bias: bool,
        device: &Device,
    ) -> Conv<N> {
        Conv::<N>::fits(inputs, outputs, groups);
        let shape = [&[outputs, inputs / groups], kernel].concat();
        let window = shape[1..].iter().product();
        let bias = bias.then(|| uniform(&[outputs], window, device));
        let options = ConvOptions::default().groups(groups);
        Conv { weight: uniform(&shape, window, device), bias, options, padding_mode: PadMode::Constant(0.0) }
    }

    /// With this in the padding.
    pub fn padding_mode(mut self, mode: PadMode) -> Conv<N> {
        self.padding_mode = mode;
        self
    }

    /// Inputs and outputs.
    fn channels(&self) -> (usize, usize) {
        (self.weight.dim(1) * self.options.groups, self.weight.dim(0))
    }

    /// The layer's result for `x`, of shape `[batch, inputs, ..]` or `[inputs, ..]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter(Self::NAME);
        channels(Self::NAME, x, x.rank().saturating_sub(N + 1), self.channels().0);
        let (weight, bias) = (&self.weight, self.bias.as_ref());
        let (x, options) = match self.padding_mode {
            PadMode::Constant(0.0) => (x.clone(), self.options),
            mode => (x.pad(&self.pads(), mode), self.options.padding(Padding::Valid)),
        };
        let y = match N {
            1 => x.conv1d(weight, bias, options),
            2 => x.conv2d(weight, bias, options),
            _ => x.conv3d(weight, bias, options),
        };
        note(self, y)
    }

    /// The padding as pairs for [`Tensor::pad`]: the last axis first.
    #[track_caller]
    fn pads(&self) -> Vec<isize> {
        let over = |extents: &Extents| match extents.over(N) {
            Some(extents) => extents,
            None => panic!("{}: {extents} does not fit {N} spatial axes", Self::NAME),
        };
        let (kernel, dilation) = (&self.weight.shape()[2..], over(&self.options.dilation));
        let pair = |axis: usize| match &self.options.padding {
            Padding::Each(extents) => [over(extents)[axis] as isize; 2],
            Padding::Valid => [0; 2],
            Padding::Same => {
                let total = (dilation[axis] * kernel[axis].saturating_sub(1)) as isize;
                [total / 2, total - total / 2]
            }
        };
        (0..N).rev().flat_map(pair).collect()
    }
}

impl<const N: usize> ConvTranspose<N> {
    #[track_caller]
    fn drawn(
        inputs: usize,
        outputs: usize,
        kernel: &[usize],
        groups: usize,
        bias: bool,
        device: &Device,
    ) -> ConvTranspose<N> {
        ConvTranspose::<N>::fits(inputs, outputs, groups);
        let shape = [&[inputs, outputs / groups], kernel].concat();
        let window = shape[1..].iter().product();
        let bias = bias.then(|| uniform(&[outputs], window, device));
        let options = ConvOptions::default().groups(groups);
        ConvTranspose { weight: uniform(&shape, window, device), bias, options }
    }

    /// With this much added to the extents of the result, at the end: of the sizes that the convolution would bring to
    /// that of the input, which one.
    pub fn output_padding(mut self, padding: impl Into<Extents>) -> ConvTranspose<N> {
        self.options = self.options.output_padding(padding);
        self
    }

    /// Inputs and outputs.
    fn channels(&self) -> (usize, usize) {
        (self.weight.dim(0), self.weight.dim(1) * self.options.groups)
    }

    /// The layer's result for `x`, of shape `[batch, inputs, ..]` or `[inputs, ..]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter(Self::NAME);
        channels(Self::NAME, x, x.rank().saturating_sub(N + 1), self.channels().0);
        let (weight, bias) = (&self.weight, self.bias.as_ref());
        let y = match N {
            1 => x.conv_transpose1d(weight, bias, self.options),
            2 => x.conv_transpose2d(weight, bias, self.options),
            _ => x.conv_transpose3d(weight, bias, self.options),
        };
        note(self, y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_weighted_and_summed_by_channel() {
        let device = Device::cpu();
        let mut layer = Conv2d::new(1, 2, 2, &device);
        layer.weight =
            Tensor::from_vec(vec![1.0f32, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [2, 1, 2, 2], &device);
        layer.bias = Some(Tensor::from_vec(vec![0.0f32, 100.0], [2], &device));
        let x = Tensor::from_vec((1..=6).map(|i| i as f32).collect(), [1, 1, 2, 3], &device);
        let y = layer.forward(&x);
        assert_eq!(y.shape()[..], [1, 2, 1, 2]);
        assert_eq!(y.to_vec::<f32>().unwrap(), [6.0, 8.0, 112.0, 116.0]);
        assert_eq!(layer.without_bias().forward(&x).to_vec::<f32>().unwrap(), [6.0, 8.0, 12.0, 16.0]);
    }

    #[test]
    fn groups_share_out_the_channels() {
        let layer = Conv2d::new(4, 8, 3, &Device::cpu()).padding(1).groups(4);
        assert_eq!(layer.weight.shape()[..], [8, 1, 3, 3]);
        assert_eq!(layer.forward(&Tensor::ones([2, 4, 5, 5], &Device::cpu())).shape()[..], [2, 8, 5, 5]);
    }

    #[test]
    #[should_panic = "4 and 6 channels do not fall into 4 groups"]
    fn channels_that_do_not_fall_into_groups() {
        let _ = Conv2d::new(4, 6, 3, &Device::cpu()).groups(4);
    }
}
