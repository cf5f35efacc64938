//! Which places of x, the kernel and y meet, in runs along the last axis.
//!
//! Three spatial axes always; missing ones are put in front with extent 1, which changes no row-major order.

use super::{Real, copy};
use kiln_ir::Conv;
use std::ops::Range;

pub(super) struct Geometry {
    pub axes: [Axis; 3],
    /// The first axis that is not put in front.
    lead: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Axis {
    pub x: usize,
    pub kernel: usize,
    pub y: usize,
    pub stride: usize,
    pub low: usize,
    pub dilation: usize,
}

impl Geometry {
    /// Of a convolution with these spatial extents of x, w and y.
    pub fn new(conv: &Conv, x: &[usize], kernel: &[usize], y: &[usize]) -> Geometry {
        let lead = 3 - x.len();
        let mut axes = [Axis { x: 1, kernel: 1, y: 1, stride: 1, low: 0, dilation: 1 }; 3];
        for (i, axis) in axes[lead..].iter_mut().enumerate() {
            let [stride, low, dilation] = [conv.stride[i], conv.low[i], conv.dilation[i]].map(|v| v as usize);
            *axis = Axis { x: x[i], kernel: kernel[i], y: y[i], stride, low, dilation };
        }
        Geometry { axes, lead }
    }

    /// Places of x.
    pub fn places(&self) -> usize {
        self.axes.iter().map(|a| a.x).product()
    }

    /// Places of the kernel.
    pub fn taps(&self) -> usize {
        self.axes.iter().map(|a| a.kernel).product()
    }

    /// Places of y.
    pub fn positions(&self) -> usize {
        self.axes.iter().map(|a| a.y).product()
    }

    /// Whether columns are x itself.
    pub fn pointwise(&self) -> bool {
        self.axes.iter().all(|a| a.kernel == 1 && a.stride == 1 && a.low == 0 && a.x == a.y)
    }

    /// The convolution of y with the reversed kernel that gives x, where there are no strides.
    pub fn mirror(&self) -> Option<Geometry> {
        let mut axes = self.axes;
        for axis in &mut axes {
            let low = ((axis.kernel - 1) * axis.dilation).checked_sub(axis.low)?;
            *axis = Axis { x: axis.y, y: axis.x, low, ..*axis };
        }
        axes.iter().all(|axis| axis.stride == 1).then_some(Geometry { axes, lead: self.lead })
    }

    /// Extent of x along the slowest axis.
    pub fn lead(&self) -> usize {
        self.axes[self.lead].x
    }

    /// The places of x between two of the slowest axis.
    pub fn slab(&self, from: usize, to: usize) -> Range<usize> {
        let (plane, most) = (self.places() / self.lead(), self.lead());
        from.min(most) * plane..to.min(most) * plane
    }

    /// The places of y that meet such a slab.
    pub fn reached(&self, from: usize, to: usize) -> Range<usize> {
        let axis = self.axes[self.lead];
        let plane = self.positions() / axis.y;
        let first = (from + axis.low)
            .saturating_sub((axis.kernel - 1) * axis.dilation)
            .div_ceil(axis.stride)
            .min(axis.y);
        let end = (to.min(axis.x) + axis.low).div_ceil(axis.stride).clamp(first, axis.y);
        first * plane..end * plane
    }

    /// What the places of y from `from` on see of x through `tap`; zeros for padding.
    ///
    /// # Safety
    /// `x` has the extents of x with these strides.
    pub unsafe fn gather<T: Real>(
        &self,
        tap: usize,
        from: usize,
        x: *const T,
        strides: [isize; 3],
        to: &mut [T],
    ) {
        let row = self.seen(tap);
        let [a, b, c] = self.axes;
        // Lines as long as x's that follow each other: one run, but for what is padding at the ends of lines.
        let flat =
            strides[1] == c.x as isize && strides[2] == 1 && c.y == c.x && c.stride == 1 && b.stride == 1;
        if flat && a.x == 1 && a.y == 1 {
            // SAFETY: the caller's promise.
            return unsafe { self.shift(&row, from, x, to) };
        }
        let step = c.stride as isize * strides[2];
        let run = self.axes[2].start(row.tap) * strides[2];
        self.runs(row.outer, from..from + to.len(), |at, outer, first, count| {
            let to = &mut to[at..at + count];
            let Some([x0, x1]) = outer else { return to.fill(T::default()) };
            let lo = row.inside.start.clamp(first, first + count) - first;
            let hi = row.inside.end.clamp(first + lo, first + count) - first;
            to[..lo].fill(T::default());
            to[hi..].fill(T::default());
            let offset =
                x0 as isize * strides[0] + x1 as isize * strides[1] + run + (first + lo) as isize * step;
            // SAFETY: `inside` are the places whose x is inside, and the caller's promise.
            unsafe { copy(x.wrapping_offset(offset), step, &mut to[lo..hi]) };
        });
    }

    /// What `gather` does in one plane of contiguous lines, which are as long as those of y.
    ///
    /// # Safety
    /// As for `gather`.
    unsafe fn shift<T: Real>(&self, row: &Seen, from: usize, x: *const T, to: &mut [T]) {
        let [a, b, c] = self.axes;
        let [plane, line] = row.outer;
        let seen = if a.meets(0, plane).is_some() { b.inside(line) } else { 0..0 };
        let shift = b.start(line) * c.x as isize + c.start(row.tap);
        // The places of y whose line is seen, less those that would be before or after all of x.
        let first = (seen.start * c.y).max((-shift).max(0) as usize);
        let end = (seen.end * c.y).min((self.places() as isize - shift).max(0) as usize);
        let lo = first.clamp(from, from + to.len()) - from;
        let hi = end.clamp(from + lo, from + to.len()) - from;
        to[..lo].fill(T::default());
        to[hi..].fill(T::default());
        if lo == hi {
            return;
        }
        // SAFETY: place p sees p + shift, which is in x for these.
        unsafe { copy(x.wrapping_offset((from + lo) as isize + shift), 1, &mut to[lo..hi]) };
        for start in (from / c.y * c.y..from + to.len()).step_by(c.y) {
            for p in (start..start + row.inside.start).chain(start + row.inside.end..start + c.y) {
                if (from..from + to.len()).contains(&p) {
                    to[p - from] = T::default();
                }
            }
        }
    }

    /// Calls `f(x, v)` for the elements of x, of which `x` is a slab that begins at place `start`, and what the places
    /// `seen` of y give them through `tap`.
    #[inline(always)]
    pub fn scatter<T: Real>(
        &self,
        tap: usize,
        seen: Range<usize>,
        start: usize,
        row: &[T],
        x: &mut [T],
        f: impl Fn(&mut T, T),
    ) {
        let taps = self.seen(tap);
        let [_, b, c] = self.axes;
        self.runs(taps.outer, seen, |at, outer, first, count| {
            let Some([x0, x1]) = outer else { return };
            let line = (x0 * b.x + x1) * c.x;
            // Where the run's place j goes: to `to + j * stride`.
            let to = line as isize + c.start(taps.tap);
            let (mut lo, mut hi) = (taps.inside.start, taps.inside.end);
            if self.lead == 2 {
                // The slab is a part of the only line.
                let after = |place: usize| ((place as isize - to).max(0) as usize).div_ceil(c.stride);
                (lo, hi) = (lo.max(after(start)), hi.min(after(start + x.len())));
            } else if line < start || line >= start + x.len() {
                return;
            }
            lo = lo.clamp(first, first + count);
            hi = hi.clamp(lo, first + count);
            if lo == hi {
                return;
            }
            let row = &row[at + lo - first..at + hi - first];
            let x = &mut x[(to + (lo * c.stride) as isize) as usize - start..];
            if c.stride == 1 {
                x[..row.len()].iter_mut().zip(row).for_each(|(x, &v)| f(x, v));
            } else {
                x.iter_mut().step_by(c.stride).zip(row).for_each(|(x, &v)| f(x, v));
            }
        });
    }

    fn seen(&self, tap: usize) -> Seen {
        let [_, b, c] = self.axes;
        let tap = [tap / (b.kernel * c.kernel), tap / c.kernel % b.kernel, tap % c.kernel];
        Seen { outer: [tap[0], tap[1]], tap: tap[2], inside: c.inside(tap[2]) }
    }

    /// Calls `f(at, outer, first, count)` for runs of `range` along the last axis of y: where the run begins in the
    /// range, its place in x along the other axes unless that is padding, and its own places.
    #[inline(always)]
    pub fn runs(
        &self,
        tap: [usize; 2],
        range: Range<usize>,
        mut f: impl FnMut(usize, Option<[usize; 2]>, usize, usize),
    ) {
        let [a, b, c] = self.axes;
        let (mut first, rest) = (range.start % c.y, range.start / c.y);
        let (mut y1, mut y0) = (rest % b.y, rest / b.y);
        let mut at = 0;
        while at < range.len() {
            let count = (c.y - first).min(range.len() - at);
            let outer = a.meets(y0, tap[0]).and_then(|x0| Some([x0, b.meets(y1, tap[1])?]));
            f(at, outer, first, count);
            at += count;
            first = 0;
            y1 += 1;
            if y1 == b.y {
                (y1, y0) = (0, y0 + 1);
            }
        }
    }

    /// Places of x with its padding, as far as y reaches.
    pub fn padded(&self) -> usize {
        super::size(self.axes.map(|a| a.padded()))
    }
}

/// A tap, and the places along the last axis of y that see x through it.
struct Seen {
    outer: [usize; 2],
    tap: usize,
    inside: Range<usize>,
}

impl Axis {
    /// The place of x that place `y` sees through `tap`, unless that is padding.
    fn meets(self, y: usize, tap: usize) -> Option<usize> {
        (y * self.stride + tap * self.dilation).checked_sub(self.low).filter(|&x| x < self.x)
    }

    /// The place of x that place 0 sees through `tap`; outside if negative.
    fn start(self, tap: usize) -> isize {
        (tap * self.dilation) as isize - self.low as isize
    }

    /// The places of y that see x through `tap`.
    fn inside(self, tap: usize) -> Range<usize> {
        let ahead = tap * self.dilation;
        let first = self.low.saturating_sub(ahead).div_ceil(self.stride).min(self.y);
        let end = (self.x + self.low).saturating_sub(ahead).div_ceil(self.stride).clamp(first, self.y);
        first..end
    }

    /// How far y reaches, padding included.
    pub fn padded(self) -> usize {
        (self.y - 1) * self.stride + (self.kernel - 1) * self.dilation + 1
    }
}
