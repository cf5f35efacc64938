//! Places as rotations.

use crate::Module;
use crate::layer::misfit;
use kiln_tensor::{DType, Device, Scope, Tensor};

/// Rotary positions: pairs of numbers of queries and keys are turned by angles that grow with their place, so that scores
/// depend on distances.
///
/// ```
/// use kiln_nn::Rotary;
/// # use kiln_tensor::{Device, Tensor};
/// let x = Tensor::randn([2, 4, 10, 16], &Device::cpu()); // [batch, heads, length, width]
/// assert_eq!(Rotary::new().forward(&x, 0).shape(), x.shape());
/// ```
#[doc(alias("RoPE"))]
#[derive(Clone, Copy, PartialEq, Debug, Module)]
pub struct Rotary {
    /// The longest wave is this times 2π places long.
    pub base: f64,
    /// Whether the numbers of a pair lie side by side (as in GPT-J), not half a width apart (as in Llama's files for Hugging
    /// Face and in GPT-NeoX).
    pub interleaved: bool,
    /// How many of the first numbers are turned, if not all.
    pub width: Option<usize>,
}

impl Default for Rotary {
    fn default() -> Rotary {
        Rotary { base: 10_000.0, interleaved: false, width: None }
    }
}

impl Rotary {
    /// With a base of 10,000, over all numbers, pairs half a width apart.
    pub fn new() -> Rotary {
        Rotary::default()
    }

    /// With this base.
    #[doc(alias("theta"))]
    pub fn base(self, base: f64) -> Rotary {
        Rotary { base, ..self }
    }

    /// With pairs side by side.
    pub fn interleaved(self) -> Rotary {
        Rotary { interleaved: true, ..self }
    }

    /// Over the first `width` numbers only.
    pub fn width(self, width: usize) -> Rotary {
        Rotary { width: Some(width), ..self }
    }

    /// `x`, of shape `[.., length, width]`, turned by places `start`, `start + 1` and so on.
    #[track_caller]
    pub fn forward(&self, x: &Tensor, start: usize) -> Tensor {
        let _scope = Scope::enter("rotary");
        let (start, length) = (start as i64, x.dim(-2) as i64);
        self.at(x, &Tensor::arange(start, start + length, 1, &x.device()))
    }

    /// `x`, of shape `[.., length, width]`, turned by these places: `[length]`, or what broadcasts over the leading axes too.
    ///
    /// # Panics
    /// If an odd number of numbers is to be turned, or more than there are.
    #[track_caller]
    pub fn at(&self, x: &Tensor, places: &Tensor) -> Tensor {
        let whole = x.dim(-1);
        let width = self.width.unwrap_or(whole);
        if !width.is_multiple_of(2) || width > whole {
            misfit("rotary", format!("{width} of {whole} numbers are not pairs ({:?})", x.shape()));
        }
        if width == 0 {
            return x.clone();
        }
        let half = width / 2;
        // In f32 also for narrower inputs, whose places would not be told apart.
        let dtype = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let angles = places.to_dtype(dtype).unsqueeze(-1) * self.frequencies(half, width, dtype, &x.device());
        let turned = x.narrow(-1, 0, width).to_dtype(dtype);
        let (a, b) = match self.interleaved {
            false => (turned.narrow(-1, 0, half), turned.narrow(-1, half as isize, half)),
            true => (turned.slice(-1, 0, isize::MAX, 2), turned.slice(-1, 1, isize::MAX, 2)),
        };
        let (cos, sin) = (angles.cos(), angles.sin());
        let (first, second) = (&a * &cos - &b * &sin, &b * &cos + &a * &sin);
        let turned = match self.interleaved {
            false => Tensor::cat(&[first, second], -1),
            true => Tensor::stack(&[first, second], -1).flatten(-2, -1),
        };
        let turned = turned.to_dtype(x.dtype());
        match whole - width {
            0 => turned,
            rest => Tensor::cat(&[turned, x.narrow(-1, width as isize, rest)], -1),
        }
    }

    fn frequencies(&self, half: usize, width: usize, dtype: DType, device: &Device) -> Tensor {
        let of = |i: usize| self.base.powf(-2.0 * i as f64 / width as f64);
        Tensor::from_vec((0..half).map(of).collect::<Vec<f64>>(), [half], device).to_dtype(dtype)
    }
}
