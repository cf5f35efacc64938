//! Images on the host, and what is done to them before training: crop, flip, resize, normalise.

use crate::Random;
use kiln_tensor::Shape;

/// An image: f32 pixels by channel, row and column. Its batch is a tensor `[batch, channels, height, width]`.
///
/// Each transform takes the image and gives another one, so that they are written in a row:
///
/// ```
/// use kiln_data::{Image, Random};
///
/// let mut random = Random::new(1);
/// let image = Image::new(vec![0.5; 3 * 40 * 30], 3, 40, 30);
/// let image = image.resize(32, 32).pad(4).random_crop(32, 32, &mut random).random_flip(&mut random);
/// let image = image.normalize(&[0.49, 0.48, 0.45], &[0.25, 0.24, 0.26]);
/// assert_eq!(image.shape(), [3, 32, 32].into());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    pixels: Vec<f32>,
    channels: usize,
    height: usize,
    width: usize,
}

impl Image {
    /// An image of these pixels.
    ///
    /// # Panics
    /// If the extents need another number of them.
    #[track_caller]
    pub fn new(pixels: Vec<f32>, channels: usize, height: usize, width: usize) -> Image {
        let want = channels.checked_mul(height).and_then(|n| n.checked_mul(width));
        let have = pixels.len();
        assert!(want == Some(have), "Image: {have} pixels do not fill [{channels}, {height}, {width}]");
        Image { pixels, channels, height, width }
    }

    /// An image of bytes, by channel, row and column: 255 becomes 1.
    ///
    /// # Panics
    /// If the extents need another number of them.
    #[doc(alias("ToTensor"))]
    #[track_caller]
    pub fn from_bytes(bytes: &[u8], channels: usize, height: usize, width: usize) -> Image {
        Image::new(bytes.iter().map(|&byte| f32::from(byte) / 255.0).collect(), channels, height, width)
    }

    /// Channels, rows and columns.
    pub fn shape(&self) -> Shape {
        Shape::from([self.channels, self.height, self.width])
    }

    /// The number of channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The number of rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// The number of columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The pixels, by channel, row and column.
    pub fn pixels(&self) -> &[f32] {
        &self.pixels
    }

    /// The pixels, to be changed.
    pub fn pixels_mut(&mut self) -> &mut [f32] {
        &mut self.pixels
    }

    /// The pixels alone.
    pub fn into_pixels(self) -> Vec<f32> {
        self.pixels
    }

    /// Another image of as many channels, whose rows `write` appends from this one's planes.
    fn replaced(&self, height: usize, width: usize, mut write: impl FnMut(&[f32], &mut Vec<f32>)) -> Image {
        let mut pixels = Vec::with_capacity(self.channels * height * width);
        let plane = self.height * self.width;
        for channel in 0..self.channels {
            write(&self.pixels[channel * plane..][..plane], &mut pixels);
        }
        Image { pixels, channels: self.channels, height, width }
    }

    /// The part of `height` by `width` pixels whose upper left pixel is at row `top`, column `left`.
    ///
    /// # Panics
    /// If it is not within the image.
    #[track_caller]
    pub fn crop(&self, top: usize, left: usize, height: usize, width: usize) -> Image {
        let fits =
            |at: usize, part: usize, whole: usize| at.checked_add(part).is_some_and(|end| end <= whole);
        assert!(
            fits(top, height, self.height) && fits(left, width, self.width),
            "crop: {height} by {width} at ({top}, {left}) is not within an image of {} by {}",
            self.height,
            self.width
        );
        self.replaced(height, width, |plane, out| {
            for row in top..top + height {
                out.extend_from_slice(&plane[row * self.width + left..][..width]);
            }
        })
    }

    /// The middle.
    ///
    /// # Panics
    /// If the image is smaller.
    #[doc(alias("CenterCrop"))]
    #[track_caller]
    pub fn center_crop(&self, height: usize, width: usize) -> Image {
        let middle = |whole: usize, part: usize| whole.saturating_sub(part) / 2;
        self.crop(middle(self.height, height), middle(self.width, width), height, width)
    }

    /// A part of this size from anywhere.
    ///
    /// # Panics
    /// If the image is smaller.
    #[doc(alias("RandomCrop"))]
    #[track_caller]
    pub fn random_crop(&self, height: usize, width: usize, random: &mut Random) -> Image {
        let mut place = |whole: usize, part: usize| random.below(whole.saturating_sub(part) + 1);
        let (top, left) = (place(self.height, height), place(self.width, width));
        self.crop(top, left, height, width)
    }

    /// A part of 8 to 100 % of the area and a ratio of 3:4 to 4:3, resized to this size.
    ///
    /// # Panics
    /// If the image has no pixel.
    #[doc(alias("RandomResizedCrop"))]
    #[track_caller]
    pub fn random_resized_crop(&self, height: usize, width: usize, random: &mut Random) -> Image {
        let area = (self.height * self.width) as f32;
        for _ in 0..10 {
            let part = area * (0.08 + 0.92 * random.uniform());
            let ratio = ((random.uniform() * 2.0 - 1.0) * (4.0f32 / 3.0).ln()).exp();
            let (w, h) = ((part * ratio).sqrt().round() as usize, (part / ratio).sqrt().round() as usize);
            if (1..=self.width).contains(&w) && (1..=self.height).contains(&h) {
                return self.random_crop(h, w, random).resize(height, width);
            }
        }
        let side = self.height.min(self.width);
        self.center_crop(side, side).resize(height, width)
    }

    /// `border` zeros on each side.
    #[doc(alias("Pad"))]
    pub fn pad(&self, border: usize) -> Image {
        let (height, width) = (self.height + 2 * border, self.width + 2 * border);
        self.replaced(height, width, |plane, out| {
            let zeros = |out: &mut Vec<f32>, count: usize| out.resize(out.len() + count, 0.0);
            zeros(out, border * width);
            for row in 0..self.height {
                zeros(out, border);
                out.extend_from_slice(&plane[row * self.width..][..self.width]);
                zeros(out, border);
            }
            zeros(out, border * width);
        })
    }

    /// Left becomes right.
    #[doc(alias("hflip"))]
    pub fn flip(mut self) -> Image {
        if self.width > 0 {
            self.pixels.chunks_exact_mut(self.width).for_each(<[f32]>::reverse);
        }
        self
    }

    /// Upper becomes lower.
    #[doc(alias("vflip"))]
    pub fn flip_vertical(&self) -> Image {
        self.replaced(self.height, self.width, |plane, out| {
            for row in (0..self.height).rev() {
                out.extend_from_slice(&plane[row * self.width..][..self.width]);
            }
        })
    }

    /// Left becomes right, or not, each half of the time.
    #[doc(alias("RandomHorizontalFlip"))]
    pub fn random_flip(self, random: &mut Random) -> Image {
        if random.chance(0.5) { self.flip() } else { self }
    }

    /// `(pixel - mean) / deviation`, a mean and a deviation for each channel.
    ///
    /// # Panics
    /// If there are not as many as channels.
    #[doc(alias("Normalize", "normalise"))]
    #[track_caller]
    pub fn normalize(mut self, mean: &[f32], deviation: &[f32]) -> Image {
        let (channels, means, deviations) = (self.channels, mean.len(), deviation.len());
        assert!(
            means == channels && deviations == channels,
            "normalize: {means} means and {deviations} deviations for {channels} channels"
        );
        let plane = (self.height * self.width).max(1);
        for (pixels, (mean, deviation)) in self.pixels.chunks_exact_mut(plane).zip(mean.iter().zip(deviation))
        {
            pixels.iter_mut().for_each(|pixel| *pixel = (*pixel - mean) / deviation);
        }
        self
    }

    /// The mean of three channels as the eye weighs them (0.299, 0.587, 0.114), as one; of others, the plain mean.
    #[doc(alias("Grayscale"))]
    pub fn gray(&self) -> Image {
        let even = vec![1.0 / self.channels.max(1) as f32; self.channels];
        let weights = if self.channels == 3 { vec![0.299, 0.587, 0.114] } else { even };
        let plane = self.height * self.width;
        let mut pixels = vec![0.0; plane];
        for (channel, weight) in weights.iter().enumerate() {
            let from = &self.pixels[channel * plane..][..plane];
            pixels.iter_mut().zip(from).for_each(|(sum, pixel)| *sum += weight * pixel);
        }
        Image { pixels, channels: 1, height: self.height, width: self.width }
    }

    /// The image at another size: linear between pixels, and averaged over all pixels that one stands for where it
    /// becomes smaller, as `antialias=True` does in PyTorch.
    ///
    /// # Panics
    /// If the image has no pixel, or shall have none.
    #[doc(alias("Resize", "interpolate"))]
    #[track_caller]
    pub fn resize(&self, height: usize, width: usize) -> Image {
        let pixels = [self.height, self.width, height, width];
        assert!(!pixels.contains(&0), "resize: from {} by {} to {height} by {width}", pixels[0], pixels[1]);
        if (height, width) == (self.height, self.width) {
            return self.clone();
        }
        let (across, down) = (weights(self.width, width), weights(self.height, height));
        let mut rows = vec![0.0f32; self.height * width];
        self.replaced(height, width, |plane, out| {
            for (from, to) in plane.chunks_exact(self.width).zip(rows.chunks_exact_mut(width)) {
                for (pixel, (first, weights)) in to.iter_mut().zip(&across) {
                    *pixel = weights.iter().zip(&from[*first..]).map(|(weight, pixel)| weight * pixel).sum();
                }
            }
            for (first, weights) in &down {
                let at = out.len();
                out.resize(at + width, 0.0);
                for (row, weight) in weights.iter().enumerate() {
                    let from = &rows[(first + row) * width..][..width];
                    out[at..].iter_mut().zip(from).for_each(|(sum, pixel)| *sum += weight * pixel);
                }
            }
        })
    }
}

/// For each of `to` pixels, the first of the `from` pixels that it is made of, and their weights: a triangle as wide as a
/// pixel of the coarser of both grids to either side.
fn weights(from: usize, to: usize) -> Vec<(usize, Vec<f32>)> {
    let scale = from as f64 / to as f64;
    let reach = scale.max(1.0);
    let one = |at: usize| {
        let center = (at as f64 + 0.5) * scale;
        // As in PyTorch, which pixels count is found by rounding.
        let first = ((center - reach + 0.5).max(0.0)) as usize;
        let end = ((center + reach + 0.5) as usize).min(from).max(first + 1);
        let weight = |pixel: usize| (1.0 - ((pixel as f64 + 0.5 - center) / reach).abs()).max(0.0);
        let all: Vec<f64> = (first..end).map(weight).collect();
        let sum: f64 = all.iter().sum();
        (first, all.iter().map(|weight| (weight / sum) as f32).collect())
    };
    (0..to).map(one).collect()
}
