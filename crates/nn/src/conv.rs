//! The convolutional layer.

use crate::Module;
use crate::init::uniform;
use kiln_tensor::{ConvOptions, Device, Scope, Tensor};

/// A convolution of `[N, inputs, H, W]` with square windows, and a bias for each output channel.
#[derive(Clone, Module)]
pub struct Conv2d {
    /// `[outputs, inputs / groups, kernel, kernel]`.
    pub weight: Tensor,
    /// `[outputs]`.
    pub bias: Option<Tensor>,
    /// Stride, padding, dilation and groups.
    pub options: ConvOptions,
}

impl Conv2d {
    /// A layer with weight and bias uniform within ±1/√n for windows of n numbers.
    ///
    /// # Panics
    /// If the channels do not fall into the groups of `options`.
    #[track_caller]
    pub fn new(
        inputs: usize,
        outputs: usize,
        kernel: usize,
        options: ConvOptions,
        device: &Device,
    ) -> Conv2d {
        let groups = options.groups;
        let fits = groups > 0 && inputs.is_multiple_of(groups) && outputs.is_multiple_of(groups);
        assert!(fits, "conv2d: {inputs} and {outputs} channels do not fall into {groups} groups");
        let window = inputs / groups * kernel * kernel;
        let weight = uniform(&[outputs, inputs / groups, kernel, kernel], window, device);
        Conv2d { weight, bias: Some(uniform(&[outputs], window, device)), options }
    }

    /// The layer without its bias.
    pub fn without_bias(mut self) -> Conv2d {
        self.bias = None;
        self
    }

    /// The layer's result for `x`, of shape `[N, inputs, H, W]` or `[inputs, H, W]`.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Tensor {
        let _scope = Scope::enter("conv2d");
        let inputs = self.weight.dim(1) * self.options.groups;
        crate::layer::channels("conv2d", x, x.rank().saturating_sub(3), inputs);
        x.conv2d(&self.weight, self.bias.as_ref(), self.options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_weighted_and_summed_by_channel() {
        let device = Device::cpu();
        let mut layer = Conv2d::new(1, 2, 2, ConvOptions::default(), &device);
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
        let options = ConvOptions::default().padding(1).groups(4);
        let layer = Conv2d::new(4, 8, 3, options, &Device::cpu());
        assert_eq!(layer.weight.shape()[..], [8, 1, 3, 3]);
        assert_eq!(layer.forward(&Tensor::ones([2, 4, 5, 5], &Device::cpu())).shape()[..], [2, 8, 5, 5]);
    }

    #[test]
    #[should_panic = "conv2d: 4 and 6 channels do not fall into 4 groups"]
    fn channels_that_do_not_fall_into_groups() {
        Conv2d::new(4, 6, 3, ConvOptions::default().groups(4), &Device::cpu());
    }
}
