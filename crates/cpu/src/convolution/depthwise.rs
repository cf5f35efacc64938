//! Groups of one channel, whose products would be too thin for a matrix kernel.
//!
//! Forward reads a padded copy of a plane of x, the weight's gradient one of a few planes side by side, the input's one
//! of a plane of y, or adds multiples of y to x; all in the order of the columns.

use super::geometry::{Axis, Geometry};
use super::{COLUMNS, ConvPlan, Ptr, Real, copy, size};
use crate::gemm::interleave;
use crate::reference::order::PANEL;
use crate::stop;
use crate::versions::versions;
use crate::view::View;
use kiln_device::Error;

/// Results of forward that are summed side by side.
const WIDE: usize = 32;
/// Outputs whose weights are summed side by side.
const LANES: usize = 16;

impl ConvPlan<'_> {
    /// Whether these kernels apply.
    pub(super) fn depthwise<T>(&self) -> bool {
        let lanes = size([self.geometry.padded().max(self.positions), LANES]);
        let slack = size([self.geometry.axes[2].stride, WIDE]);
        self.inner == 1 && self.taps <= PANEL && size([lanes.max(slack), size_of::<T>()]) <= 4 * COLUMNS
    }

    pub(super) fn depthwise_forward<T: Real>(&self, x: &View, w: &View, y: &View) -> Result<(), Error> {
        let stride = self.geometry.axes[2].stride;
        let w = self.cx.dense(w)?;
        let image = self.image::<T>(x);
        let (pw, to) = (Ptr(w.ptr::<T>()), Ptr(y.ptr::<T>()));
        let (plane, offsets) = (self.geometry.padded(), offsets(&self.geometry));
        let split = plane + WIDE * stride;
        let scratch_len = split + run(&self.geometry).next_multiple_of(WIDE);
        let work = size([self.batch, self.groups, self.share, self.positions, self.taps]);
        self.share_out::<T>(work, self.batch * self.groups, scratch_len, &|task, scratch| {
            let (n, g) = (task / self.groups, task % self.groups);
            // SAFETY: the scratch holds the plane, its slack and the sums of a run.
            let (padded, sums) =
                unsafe { (Ptr(scratch).slice(0, split), Ptr(scratch).slice(split, scratch_len - split)) };
            padded.fill(T::default());
            let from = image.base.at(n as isize * image.batch + g as isize * image.channel);
            lines(&self.geometry, |line, x0, x1, count| {
                let from =
                    from.wrapping_offset(x0 as isize * image.strides[0] + x1 as isize * image.strides[1]);
                // SAFETY: the line is one of x's view.
                unsafe { copy(from.cast_const(), image.strides[2], &mut padded[line..line + count]) };
            });
            for o in g * self.share..(g + 1) * self.share {
                // SAFETY: w holds `taps` weights for each output.
                let w = unsafe { pw.slice(o * self.taps, self.taps) };
                // SAFETY: this plane of y is this task's alone.
                let y =
                    unsafe { to.slice((n * self.groups * self.share + o) * self.positions, self.positions) };
                runs(&self.geometry, sums, y, |at, sums| sum_run(&padded[at..], stride, &offsets, w, sums));
            }
        })
    }

    pub(super) fn depthwise_weight<T: Real>(&self, x: &View, w: &View, y: &View) -> Result<(), Error> {
        let [a, b, c] = self.geometry.axes;
        let outputs = self.groups * self.share;
        let y = self.flat(y, &[self.batch, outputs, self.positions])?;
        let image = self.image::<T>(x);
        let (py, to) = (Ptr(y.ptr::<T>()), Ptr(w.ptr::<T>()));
        let (plane, offsets) = (self.geometry.padded(), offsets(&self.geometry));
        let sizes = [plane * LANES, self.positions * LANES, self.taps * LANES, self.taps * LANES];
        let work = size([self.batch, outputs, self.positions, self.taps]);
        self.share_out::<T>(work, outputs.div_ceil(LANES), sizes.iter().sum(), &|task, scratch| {
            let first = task * LANES;
            // Lanes past the last output are not used.
            let used = LANES.min(outputs - first);
            let lane: [usize; LANES] = std::array::from_fn(|l| (first + l).min(outputs - 1));
            let mut at = 0;
            // SAFETY: the scratch holds the four parts one after another.
            let [xs, ys, panel, total] = sizes.map(|len| unsafe {
                at += len;
                Ptr(scratch).slice(at - len, len)
            });
            xs.fill(T::default());
            panel.fill(T::default());
            let (mut terms, mut panels) = (0, 0);
            for n in 0..self.batch {
                stop::check();
                let from = |o: usize| {
                    image.base.at(n as isize * image.batch + (o / self.share) as isize * image.channel)
                };
                lines(&self.geometry, |line, x0, x1, count| {
                    let offset = x0 as isize * image.strides[0] + x1 as isize * image.strides[1];
                    let to = &mut xs[line * LANES..][..count * LANES];
                    // SAFETY: the lines are those of x's view; outputs that do not share a channel have lines evenly
                    // apart.
                    unsafe {
                        if self.share == 1 {
                            let from = from(first).wrapping_offset(offset);
                            interleave(
                                from,
                                [image.channel, image.strides[2]],
                                used,
                                LANES,
                                count,
                                to.as_mut_ptr(),
                            );
                        } else {
                            gather(lane.map(|o| from(o).wrapping_offset(offset)), image.strides[2], to)
                        }
                    };
                });
                let from = py.at(n as isize * y.strides[0] + first as isize * y.strides[1]);
                // SAFETY: the planes are those of y's view, and there is room for their places.
                unsafe {
                    interleave(
                        from,
                        [y.strides[1], y.strides[2]],
                        used,
                        LANES,
                        self.positions,
                        ys.as_mut_ptr(),
                    )
                };
                let mut p = 0;
                while p < self.positions {
                    let (y0, y1, y2) = (p / (b.y * c.y), p / c.y % b.y, p % c.y);
                    let count = (c.y - y2).min(PANEL - terms);
                    let base = (y0 * a.stride * b.padded() + y1 * b.stride) * c.padded() + y2 * c.stride;
                    sum_lanes(
                        &xs[base * LANES..],
                        c.stride,
                        &offsets,
                        &ys[p * LANES..(p + count) * LANES],
                        panel,
                    );
                    (p, terms) = (p + count, terms + count);
                    if terms == PANEL || (n + 1 == self.batch && p == self.positions) {
                        if panels == 0 {
                            total.copy_from_slice(panel)
                        } else {
                            super::add(total, panel)
                        }
                        panel.fill(T::default());
                        (terms, panels) = (0, panels + 1);
                    }
                }
            }
            for o in first..outputs.min(first + LANES) {
                // SAFETY: this output's weights are this task's alone.
                let w = unsafe { to.slice(o * self.taps, self.taps) };
                w.iter_mut().zip(total.chunks(LANES)).for_each(|(w, sums)| *w = sums[o - first]);
            }
        })
    }

    /// For one output per channel: a column's chain is a single product there, and the sum of products from 0 is the same
    /// whatever the signs of those that are 0.
    pub(super) fn depthwise_input<T: Real>(&self, x: &View, w: &View, y: &View) -> Result<(), Error> {
        let (pw, py, to) = (Ptr(w.ptr::<T>()), Ptr(y.ptr::<T>()), Ptr(x.ptr::<T>()));
        let work = size([self.batch, self.groups, self.positions, self.taps]);
        // x may be longer than what y reaches, and its mirror wider than any plane so far.
        let mirror = self.geometry.mirror().filter(|mirror| mirror.padded() < usize::MAX / 4);
        let sizes = mirror
            .as_ref()
            .map_or([0; 3], |mirror| [mirror.padded() + WIDE, run(mirror).next_multiple_of(WIDE), self.taps]);
        let offsets: Option<Vec<usize>> =
            mirror.as_ref().map(|mirror| offsets(mirror).into_iter().rev().collect());
        self.share_out::<T>(work, self.batch * self.groups, sizes.iter().sum(), &|task, scratch| {
            let (n, g) = (task / self.groups, task % self.groups);
            let mut at = 0;
            // SAFETY: the scratch holds the three parts one after another.
            let [padded, sums, weights] = sizes.map(|len| unsafe {
                at += len;
                Ptr(scratch).slice(at - len, len)
            });
            // SAFETY: this plane of x is this task's alone.
            let x = unsafe { to.slice(task * self.places, self.places) };
            let at = n as isize * y.strides[0] + g as isize * y.strides[1];
            // SAFETY: the places of a plane of y are neighbours, and nobody writes them.
            let y = unsafe { std::slice::from_raw_parts(py.at(at).cast_const(), self.positions) };
            // SAFETY: the weight is one of w's view.
            let weight =
                |tap: usize| unsafe { *pw.at(g as isize * w.strides[0] + tap as isize * w.strides[1]) };
            weights.iter_mut().enumerate().for_each(|(tap, w)| *w = weight(tap));
            // Zeros around y add 0 to a sum that is never -0, unless a weight is not finite.
            let finite = weights.iter().all(|&w| w * T::default() == T::default());
            if let (Some(mirror), Some(offsets), true) = (&mirror, &offsets, finite) {
                let [_, b, c] = mirror.axes;
                padded.fill(T::default());
                lines(mirror, |line, y0, y1, count| {
                    padded[line..line + count].copy_from_slice(&y[(y0 * b.x + y1) * c.x..][..count]);
                });
                return runs(mirror, sums, x, |at, sums| add_run(&padded[at..], offsets, weights, sums));
            }
            x.fill(T::default());
            for tap in 0..self.taps {
                let w = weight(tap);
                self.geometry.scatter(tap, 0..self.positions, 0, y, x, |x, y| *x += w * y);
            }
        })
    }
}

/// Where each tap is in a padded plane.
fn offsets(geometry: &Geometry) -> Vec<usize> {
    let [_, b, c] = geometry.axes;
    let steps = geometry.axes.map(|a| (0..a.kernel).map(move |k| k * a.dilation));
    let [first, second, third] = steps;
    let lines = first.flat_map(|i| second.clone().map(move |j| (i * b.padded() + j) * c.padded()));
    lines.flat_map(|line| third.clone().map(move |k| line + k)).collect()
}

/// Calls `f(at, x0, x1, count)` for the lines of x: where it goes in a padded plane, which it is, and how much of it is
/// reached.
fn lines(geometry: &Geometry, mut f: impl FnMut(usize, usize, usize, usize)) {
    let [a, b, c] = geometry.axes;
    let reached = |axis: Axis| axis.x.min(axis.padded().saturating_sub(axis.low));
    // Where padding is longer than what is reached, a line would begin behind the plane.
    if reached(c) == 0 {
        return;
    }
    for x0 in 0..reached(a) {
        for x1 in 0..reached(b) {
            let line = ((x0 + a.low) * b.padded() + x1 + b.low) * c.padded() + c.low;
            f(line, x0, x1, reached(c));
        }
    }
}

/// Lines of y in a run. With no strides, all are one run over the padded plane, whose sums between lines are not used.
fn together(geometry: &Geometry) -> usize {
    let [_, b, c] = geometry.axes;
    if b.stride == 1 && c.stride == 1 { b.y } else { 1 }
}

/// Sums of a run.
fn run(geometry: &Geometry) -> usize {
    let c = geometry.axes[2];
    (together(geometry) - 1) * c.padded() + c.y
}

/// Has `sum(at, sums)` sum up each run, which begins at `at` in a padded plane, and takes its lines to `y`.
fn runs<T: Copy>(geometry: &Geometry, sums: &mut [T], y: &mut [T], sum: impl Fn(usize, &mut [T])) {
    let ([a, b, c], together) = (geometry.axes, together(geometry));
    for y0 in 0..a.y {
        for y1 in (0..b.y).step_by(together) {
            sum((y0 * a.stride * b.padded() + y1 * b.stride) * c.padded(), sums);
            let y = &mut y[(y0 * b.y + y1) * c.y..];
            for (line, y) in y.chunks_mut(c.y).take(together).enumerate() {
                y.copy_from_slice(&sums[line * c.padded()..][..c.y]);
            }
        }
    }
}

/// Lines side by side.
///
/// # Safety
/// Each has as many elements `stride` apart as `to` has groups of lanes.
unsafe fn gather<T: Real>(from: [*mut T; LANES], stride: isize, to: &mut [T]) {
    for (i, to) in to.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        for (to, from) in to.iter_mut().zip(from) {
            // SAFETY: promised by the caller.
            *to = unsafe { *from.wrapping_offset(i as isize * stride) };
        }
    }
}

versions! {
    /// Sums over the taps at places `stride` apart; as many as `sums` has room for, a multiple of `WIDE`.
    fn sum_run<T: Real>(x: &[T], stride: usize, offsets: &[usize], w: &[T], sums: &mut [T]) = sum_run_body;

    /// As `sum_run` at neighbours, with products that are rounded before they are added.
    fn add_run<T: Real>(x: &[T], offsets: &[usize], w: &[T], sums: &mut [T]) = add_run_body;

    /// Goes on with a panel's chains, of which each tap has one in each lane, over neighbours in y.
    fn sum_lanes<T: Real>(x: &[T], stride: usize, offsets: &[usize], y: &[T], panel: &mut [T]) = sum_lanes_body;
}

#[inline(always)]
fn sum_run_body<T: Real>(x: &[T], stride: usize, offsets: &[usize], w: &[T], sums: &mut [T]) {
    over_taps(x, stride, offsets, w, sums, |sum, x, w| x.fma(w, sum))
}

#[inline(always)]
fn add_run_body<T: Real>(x: &[T], offsets: &[usize], w: &[T], sums: &mut [T]) {
    let add = |mut sum: T, x: T, w: T| {
        sum += w * x;
        sum
    };
    over_taps(x, 1, offsets, w, sums, add)
}

#[inline(always)]
fn over_taps<T: Real>(
    x: &[T],
    stride: usize,
    offsets: &[usize],
    w: &[T],
    sums: &mut [T],
    add: impl Fn(T, T, T) -> T,
) {
    for (i, sums) in sums.as_chunks_mut::<WIDE>().0.iter_mut().enumerate() {
        let x = &x[i * WIDE * stride..];
        let mut acc = [T::default(); WIDE];
        for (&offset, &w) in offsets.iter().zip(w) {
            if stride == 1 {
                let x: &[T; WIDE] = x[offset..].first_chunk().expect("slack behind the plane");
                for l in 0..WIDE {
                    acc[l] = add(acc[l], x[l], w);
                }
            } else {
                let x = &x[offset..][..(WIDE - 1) * stride + 1];
                for l in 0..WIDE {
                    acc[l] = add(acc[l], x[l * stride], w);
                }
            }
        }
        *sums = acc;
    }
}

#[inline(always)]
fn sum_lanes_body<T: Real>(x: &[T], stride: usize, offsets: &[usize], y: &[T], panel: &mut [T]) {
    let y = y.as_chunks::<LANES>().0;
    let panel = panel.as_chunks_mut::<LANES>().0;
    let mut done = 0;
    while done < offsets.len() {
        let (offsets, panel) = (&offsets[done..], &mut panel[done..]);
        done += match offsets.len() {
            9.. => chains::<T, 9>(x, stride, offsets, y, panel),
            5.. => chains::<T, 5>(x, stride, offsets, y, panel),
            3.. => chains::<T, 3>(x, stride, offsets, y, panel),
            _ => chains::<T, 1>(x, stride, offsets, y, panel),
        };
    }
}

/// `N` taps at once: a single chain would wait for its own additions.
#[inline(always)]
fn chains<T: Real, const N: usize>(
    x: &[T],
    stride: usize,
    offsets: &[usize],
    y: &[[T; LANES]],
    panel: &mut [[T; LANES]],
) -> usize {
    let span = (y.len() - 1) * stride + 1;
    let taps: [&[[T; LANES]]; N] = std::array::from_fn(|k| &x[offsets[k] * LANES..].as_chunks().0[..span]);
    let mut acc: [[T; LANES]; N] = std::array::from_fn(|k| panel[k]);
    for (j, y) in y.iter().enumerate() {
        for (acc, taps) in acc.iter_mut().zip(&taps) {
            let x = &taps[j * stride];
            for l in 0..LANES {
                acc[l] = x[l].fma(y[l], acc[l]);
            }
        }
    }
    panel[..N].copy_from_slice(&acc);
    N
}
