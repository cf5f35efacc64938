//! Windows put back where they were taken from.

use super::Extents;
use super::conv::{ConvOptions, geometry, padded, places};
use crate::{DType, Tensor};
use kiln_device::method;
use kiln_ir::{Op, ScatterKind};

/// # Windows put back
impl Tensor {
    /// The adjoint of [`Tensor::unfold`]: windows `[N, C * kernel, count]` (or without N) summed where they overlap into an
    /// image `[N, C, H, W]` of this size.
    ///
    /// ```
    /// # use kiln_tensor::*;
    /// let windows = Tensor::ones([1, 4, 4], &Device::cpu());
    /// let image = windows.fold([3, 3], 2, ConvOptions::default());
    /// assert_eq!(image.to_vec::<f32>().unwrap(), [1.0, 2.0, 1.0, 2.0, 4.0, 2.0, 1.0, 2.0, 1.0]);
    /// ```
    #[track_caller]
    pub fn fold(&self, size: impl Into<Extents>, kernel: impl Into<Extents>, options: ConvOptions) -> Tensor {
        let _method = method("fold");
        let single = self.rank() == 2;
        assert!(single || self.rank() == 3, "fold: shape {:?} is not [N, C * kernel, count]", self.shape());
        let x = if single { self.unsqueeze(0) } else { self.clone() };
        let conv = geometry("fold", 2, &options);
        let size = size.into().resolve("fold", "size", 2, 1).map(|d| d as usize);
        let kernel = kernel.into().resolve("fold", "kernel", 2, 1).map(|k| k as usize);
        let low = padded("fold", &options);
        let whole = [size[0] + 2 * low[0] as usize, size[1] + 2 * low[1] as usize];
        let counts = super::conv::counts("fold", whole, kernel, &conv);
        let [n, channels, windows] = [x.shape()[0], x.shape()[1], x.shape()[2]];
        let taps = kernel[0] * kernel[1];
        let fits = channels.is_multiple_of(taps) && windows == counts[0] * counts[1];
        assert!(
            fits,
            "fold: shape {:?} does not hold {} by {} windows of {} by {}",
            self.shape(),
            counts[0],
            counts[1],
            kernel[0],
            kernel[1]
        );
        let c = channels / taps;
        let device = x.value.device();
        let x = x.reshape([n, c, kernel[0], kernel[1], counts[0], counts[1]]).permute([0, 1, 2, 4, 3, 5]);
        // [taps, windows] of each spatial axis become places of that axis by one indexed sum.
        let rows = places(kernel[0], counts[0], conv.dilation[0], conv.stride[0], device);
        let columns = places(kernel[1], counts[1], conv.dilation[1], conv.stride[1], device);
        let dtype: DType = x.dtype();
        let lines = Tensor::full([n, c, kernel[0], counts[0], whole[1]], 0, dtype, device);
        let lines = summed_at(&lines, &columns, &x, 4);
        let image = Tensor::full([n, c, whole[0], whole[1]], 0, dtype, device);
        let image = summed_at(&image, &rows, &lines, 2);
        let out = image.narrow(2, low[0], size[0]).narrow(3, low[1], size[1]);
        if single { out.squeeze(0) } else { out }
    }
}

#[track_caller]
fn summed_at(zeros: &Tensor, index: &Tensor, source: &Tensor, axis: u8) -> Tensor {
    Tensor::one(Op::Scatter { kind: ScatterKind::TakeAdd, axis }, &[zeros, index, source])
}
