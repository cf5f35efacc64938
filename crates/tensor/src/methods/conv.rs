//! Convolutions over one to three spatial axes, their transposes, and the windows they slide.

use super::Extents;
use crate::{DType, Shape, Tensor};
use kiln_device::method;
use kiln_ir::{Conv, ConvKind, Op, promote};

/// Geometry of a convolution. All of stride, padding, dilation and output padding are one number, or one for each axis.
///
/// ```
/// # use kiln_tensor::*;
/// let (x, w) = (Tensor::ones([1, 3, 8, 8], &Device::cpu()), Tensor::ones([4, 3, 3, 3], &Device::cpu()));
/// let y = x.conv2d(&w, None, ConvOptions::default().stride(2).padding(1));
/// assert_eq!(y.shape()[..], [1, 4, 4, 4]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ConvOptions {
    /// Distance between windows.
    pub stride: Extents,
    /// Zeros around the input.
    pub padding: Padding,
    /// Distance between the taps of a window.
    pub dilation: Extents,
    /// How many parts the channels fall into, convolved apart.
    pub groups: usize,
    /// Added to the extents of a transposed convolution's result, at the end.
    pub output_padding: Extents,
}

/// Zeros around the input of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// This many at both ends.
    Each(Extents),
    /// As many as keep the extents; an odd one goes to the end.
    Same,
    /// None.
    Valid,
}

impl<E: Into<Extents>> From<E> for Padding {
    fn from(extents: E) -> Padding {
        Padding::Each(extents.into())
    }
}

impl Default for ConvOptions {
    fn default() -> ConvOptions {
        let one = Extents::from(1);
        ConvOptions {
            stride: one,
            padding: Padding::Valid,
            dilation: one,
            groups: 1,
            output_padding: Extents::from(0),
        }
    }
}

impl ConvOptions {
    /// With this stride.
    pub fn stride(self, stride: impl Into<Extents>) -> ConvOptions {
        ConvOptions { stride: stride.into(), ..self }
    }

    /// With this padding.
    pub fn padding(self, padding: impl Into<Padding>) -> ConvOptions {
        ConvOptions { padding: padding.into(), ..self }
    }

    /// With this dilation.
    pub fn dilation(self, dilation: impl Into<Extents>) -> ConvOptions {
        ConvOptions { dilation: dilation.into(), ..self }
    }

    /// With this many groups.
    pub fn groups(self, groups: usize) -> ConvOptions {
        ConvOptions { groups, ..self }
    }

    /// With this output padding.
    pub fn output_padding(self, padding: impl Into<Extents>) -> ConvOptions {
        ConvOptions { output_padding: padding.into(), ..self }
    }
}

impl std::fmt::Display for Padding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Padding::Each(extents) => write!(f, "{extents}"),
            Padding::Same => f.write_str("same"),
            Padding::Valid => f.write_str("0"),
        }
    }
}

/// All that is told of a window: stride, padding, dilation and groups.
impl std::fmt::Display for ConvOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ConvOptions { stride, padding, dilation, groups, output_padding } = self;
        write!(f, "stride {stride}, padding {padding}")?;
        if *dilation != Extents::from(1) {
            write!(f, ", dilation {dilation}")?;
        }
        if *groups != 1 {
            write!(f, ", groups {groups}")?;
        }
        if *output_padding != Extents::from(0) {
            write!(f, ", output padding {output_padding}")?;
        }
        Ok(())
    }
}

macro_rules! convolutions {
    ($($n:literal $conv:ident $transpose:ident $axes:literal;)*) => {
        /// # Convolutions
        impl Tensor {
            $(
                #[doc = concat!("Convolution over ", $axes, ": `[N, C, ..]` or `[C, ..]` with a weight `[O, C / groups, ..]` and a bias `[O]`.")]
                #[track_caller]
                pub fn $conv(&self, weight: &Tensor, bias: Option<&Tensor>, options: ConvOptions) -> Tensor {
                    let _method = method(stringify!($conv));
                    forward(stringify!($conv), $n, self, weight, bias, &options)
                }

                #[doc = concat!("Transposed convolution over ", $axes, ": `[N, C, ..]` or `[C, ..]` with a weight `[C, O / groups, ..]` and a bias `[O]`.")]
                #[track_caller]
                pub fn $transpose(&self, weight: &Tensor, bias: Option<&Tensor>, options: ConvOptions) -> Tensor {
                    let _method = method(stringify!($transpose));
                    transposed(stringify!($transpose), $n, self, weight, bias, &options)
                }
            )*
        }
    };
}
convolutions! {
    1 conv1d conv_transpose1d "one axis";
    2 conv2d conv_transpose2d "two axes";
    3 conv3d conv_transpose3d "three axes";
}

#[track_caller]
fn forward(
    name: &str,
    n: usize,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    options: &ConvOptions,
) -> Tensor {
    let (x, w, single) = operands(name, n, x, w);
    channels(name, &x, w.shape()[1].saturating_mul(options.groups), &w);
    let mut conv = geometry(name, n, options);
    match options.padding {
        Padding::Each(extents) => {
            conv.low = extents.resolve(name, "padding", n, 0);
            conv.high = conv.low;
        }
        Padding::Same => {
            assert!(conv.stride == [1; 3], "{name}: padding that keeps the extents needs a stride of 1");
            for i in 0..n {
                let total = conv.dilation[i].saturating_mul((w.shape()[i + 2] as u32).saturating_sub(1));
                conv.low[i] = total / 2;
                conv.high[i] = total - total / 2;
            }
        }
        Padding::Valid => {}
    }
    let y = Tensor::one(Op::Conv { kind: ConvKind::Forward, conv }, &[&x, &w]);
    finished(name, y, bias, single)
}

#[track_caller]
fn transposed(
    name: &str,
    n: usize,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    options: &ConvOptions,
) -> Tensor {
    let (x, w, single) = operands(name, n, x, w);
    channels(name, &x, w.shape()[0], &w);
    let mut conv = geometry(name, n, options);
    conv.low = match options.padding {
        Padding::Each(extents) => extents.resolve(name, "padding", n, 0),
        Padding::Valid => [0; 3],
        Padding::Same => panic!("{name}: padding that keeps the extents is not defined for it"),
    };
    conv.high = conv.low;
    let extra = options.output_padding.resolve(name, "output padding", n, 0);
    for (i, &extra) in extra[..n].iter().enumerate() {
        let (stride, dilation) = (conv.stride[i], conv.dilation[i]);
        assert!(
            extra < stride.max(dilation),
            "{name}: output padding {extra} is below neither stride {stride} nor dilation {dilation}"
        );
        let (length, kernel) = (x.shape()[i + 2] as i128, w.shape()[i + 2] as i128);
        let span = (kernel - 1) * dilation as i128 + 1;
        let extent = (length - 1) * stride as i128 + span - 2 * conv.low[i] as i128 + extra as i128;
        conv.extent[i] = match u32::try_from(extent) {
            Ok(extent) => extent,
            Err(_) => panic!("{name}: shapes {:?} and {:?} do not fit together", x.shape(), w.shape()),
        };
    }
    let y = Tensor::one(Op::Conv { kind: ConvKind::Input, conv }, &[&x, &w]);
    finished(name, y, bias, single)
}

/// Both operands in one dtype, the input with a batch axis, and whether that axis is new.
#[track_caller]
fn operands(name: &str, n: usize, x: &Tensor, w: &Tensor) -> (Tensor, Tensor, bool) {
    let single = x.rank() == n + 1;
    assert!(
        (single || x.rank() == n + 2) && w.rank() == n + 2,
        "{name}: shapes {:?} and {:?} do not have {n} spatial axes",
        x.shape(),
        w.shape()
    );
    let dtype = promote(x.dtype(), w.dtype());
    let x = if single { x.unsqueeze(0) } else { x.clone() };
    (x.to_dtype(dtype), w.to_dtype(dtype), single)
}

/// The input's channels are those that the weight takes.
#[track_caller]
fn channels(name: &str, x: &Tensor, want: usize, w: &Tensor) {
    let (shape, got) = (x.shape(), x.shape()[1]);
    if got == want {
        return;
    }
    // As in `[N, H, W, C]`.
    let last = if shape.last() == Some(&want) { "; channels come before the spatial axes" } else { "" };
    panic!(
        "{name}: {got} channels where {want} are expected (input {shape:?}, weight {:?}){last}",
        w.shape()
    );
}

#[track_caller]
pub(super) fn geometry(name: &str, n: usize, options: &ConvOptions) -> Conv {
    let Ok(groups) = u32::try_from(options.groups) else {
        panic!("{name}: {} groups are too many", options.groups)
    };
    Conv {
        stride: options.stride.resolve(name, "stride", n, 1),
        low: [0; 3],
        high: [0; 3],
        dilation: options.dilation.resolve(name, "dilation", n, 1),
        extent: [0; 3],
        groups,
    }
}

#[track_caller]
fn finished(name: &str, y: Tensor, bias: Option<&Tensor>, single: bool) -> Tensor {
    let y = match bias {
        Some(bias) => {
            let channels = y.shape()[1];
            assert!(
                bias.shape()[..] == [channels],
                "{name}: a bias of shape {:?} for {channels} channels",
                bias.shape()
            );
            let mut shape = Shape::repeat(1, y.rank() - 1);
            shape[0] = channels;
            y + bias.reshape(shape)
        }
        None => y,
    };
    if single { y.squeeze(0) } else { y }
}

/// # Windows taken out
impl Tensor {
    /// The windows that a convolution slides over `[N, C, H, W]` or `[C, H, W]`, as columns: `[N, C * kernel, windows]`.
    #[track_caller]
    pub fn unfold(&self, kernel: impl Into<Extents>, options: ConvOptions) -> Tensor {
        let _method = method("unfold");
        let single = self.rank() == 3;
        assert!(single || self.rank() == 4, "unfold: shape {:?} is not [N, C, H, W]", self.shape());
        let x = if single { self.unsqueeze(0) } else { self.clone() };
        let conv = geometry("unfold", 2, &options);
        let kernel = kernel.into().resolve("unfold", "kernel", 2, 1).map(|k| k as usize);
        let low = padded("unfold", &options);
        let x = x.pad(&[low[1], low[1], low[0], low[0]], super::PadMode::Constant(0.0));
        let counts = counts("unfold", [x.shape()[2], x.shape()[3]], kernel, &conv);
        // Each spatial axis becomes [taps, windows] by one indexed read.
        let device = x.value.device();
        let rows = places(kernel[0], counts[0], conv.dilation[0], conv.stride[0], device);
        let columns = places(kernel[1], counts[1], conv.dilation[1], conv.stride[1], device);
        let windows = x.taken(2, &rows).taken(4, &columns).permute([0, 1, 2, 4, 3, 5]);
        let shape = [x.shape()[0], x.shape()[1] * kernel[0] * kernel[1], counts[0] * counts[1]];
        let out = windows.reshape(shape);
        if single { out.squeeze(0) } else { out }
    }
}

/// Zeros at each end of rows and columns.
#[track_caller]
pub(super) fn padded(name: &str, options: &ConvOptions) -> [isize; 2] {
    match options.padding {
        Padding::Each(extents) => {
            let [rows, columns, _] = extents.resolve(name, "padding", 2, 0);
            [rows as isize, columns as isize]
        }
        Padding::Valid => [0; 2],
        Padding::Same => panic!("{name}: padding that keeps the extents is not defined for it"),
    }
}

/// How many windows there are along rows and columns of these extents.
#[track_caller]
pub(super) fn counts(name: &str, extents: [usize; 2], kernel: [usize; 3], conv: &Conv) -> [usize; 2] {
    let mut counts = [0; 2];
    for i in 0..2 {
        let (stride, dilation) = (conv.stride[i] as usize, conv.dilation[i] as usize);
        assert!(
            kernel[i] > 0 && stride > 0 && dilation > 0,
            "{name}: kernel, stride and dilation are at least 1"
        );
        let span = (kernel[i] - 1) * dilation + 1;
        let Some(rest) = extents[i].checked_sub(span) else {
            panic!("{name}: a window of {span} does not fit an axis of {}", extents[i])
        };
        counts[i] = rest / stride + 1;
    }
    counts
}

/// The index of each tap of each window: `[taps, windows]`.
#[track_caller]
pub(super) fn places(
    taps: usize,
    windows: usize,
    dilation: u32,
    stride: u32,
    device: &crate::Device,
) -> Tensor {
    let tap = Tensor::create(Op::Iota { shape: [taps, 1].into(), dtype: DType::I64, axis: 0 }, device);
    let window = Tensor::create(Op::Iota { shape: [1, windows].into(), dtype: DType::I64, axis: 1 }, device);
    tap * dilation as i64 + window * stride as i64
}
