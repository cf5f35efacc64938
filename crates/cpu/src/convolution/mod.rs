//! Convolution and its adjoints as matrix products of columns.
//!
//! A column is what one place of y sees of x: the channels of a group times the kernel, zeros for padding. Forward is
//! w times columns, the weight's gradient y times columns transposed, and the input's gradient makes columns as wᵀ y
//! and adds them up in x. Columns are made block by block in scratch of a few MiB per thread; blocks cut results, never
//! a sum (except at the panels of its order), so that blocks, threads and strides leave the bits of
//! `reference/conv.rs`. Called by the device; f16 and bf16 are computed in f32 and rounded once.

mod depthwise;
mod geometry;

#[cfg(test)]
mod tests;

use crate::cpu::Context;
use crate::elementwise;
use crate::gemm::{GemmScalar, Mat, MatMut, gemm};
use crate::pool;
use crate::reference::order::PANEL;
use crate::stop;
use crate::tile::Out;
use crate::versions::versions;
use crate::view::View;
use geometry::Geometry;
use kiln_device::{Error, Place};
use kiln_host::Arg;
use kiln_ir::{Conv, ConvKind, DType, Meta, Shape};
use std::ops::{AddAssign, Mul, Range};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Whether convolutions of this type run here.
pub(crate) fn has_kernel(dtype: DType) -> bool {
    dtype.is_float()
}

pub(crate) fn conv(
    cx: &Context<'_>,
    kind: ConvKind,
    conv: &Conv,
    a: &View,
    b: &View,
    out: Meta,
) -> Result<View, Error> {
    match out.dtype {
        DType::F32 => run::<f32>(cx, kind, conv, a, b, out),
        DType::F64 => run::<f64>(cx, kind, conv, a, b, out),
        _ => {
            let temporary = Context { arena: cx.arena, place: Place::Reuse };
            let cast = |cx: &Context<'_>, x: &View, dtype: DType| {
                elementwise::cast(cx, &mut [Arg::Shared(x.clone())], Meta { dtype, shape: x.shape })
            };
            let (a, b) = (cast(&temporary, a, DType::F32)?, cast(&temporary, b, DType::F32)?);
            let wide =
                run::<f32>(&temporary, kind, conv, &a, &b, Meta { dtype: DType::F32, shape: out.shape })?;
            cast(cx, &wide, out.dtype)
        }
    }
}

/// Bytes of columns that a thread makes at a time, about: they are packed from the second-level cache.
const COLUMNS: usize = 1 << 20;
/// Multiply-adds below which all is done by the caller.
const SMALL: usize = 1 << 16;

/// A type to compute in.
trait Real: GemmScalar + AddAssign + Mul<Output = Self> + PartialEq {
    const DTYPE: DType;
}
impl Real for f32 {
    const DTYPE: DType = DType::F32;
}
impl Real for f64 {
    const DTYPE: DType = DType::F64;
}

fn run<T: Real>(
    cx: &Context<'_>,
    kind: ConvKind,
    conv: &Conv,
    a: &View,
    b: &View,
    out: Meta,
) -> Result<View, Error> {
    let target = cx.fresh(out)?;
    if a.numel() == 0 || b.numel() == 0 {
        // SAFETY: the target is fresh and holds this many elements.
        unsafe { Out::<T>::new(&target).range(0, target.numel()) }.fill(T::default());
        return Ok(target);
    }
    if target.numel() == 0 {
        return Ok(target);
    }
    let (x, w, y) = match kind {
        ConvKind::Forward => (a, b, &target),
        ConvKind::Input => (&target, b, a),
        ConvKind::Weight => (a, &target, b),
    };
    let geometry = Geometry::new(conv, &x.shape[2..], &w.shape[2..], &y.shape[2..]);
    let groups = conv.groups as usize;
    let plan = ConvPlan {
        cx: &Context { arena: cx.arena, place: Place::Reuse },
        batch: x.shape[0],
        groups,
        inner: w.shape[1],
        share: w.shape[0] / groups,
        places: geometry.places(),
        taps: geometry.taps(),
        positions: geometry.positions(),
        geometry,
    };
    match kind {
        ConvKind::Forward => plan.forward::<T>(x, w, y)?,
        ConvKind::Input => plan.input::<T>(x, w, y)?,
        ConvKind::Weight => plan.weight::<T>(x, w, y)?,
    }
    Ok(target)
}

/// One convolution: y[batch, groups · share, positions] of x[batch, groups · inner, places] and
/// w[groups · share, inner, taps]. Nothing in it is empty.
struct ConvPlan<'a> {
    cx: &'a Context<'a>,
    batch: usize,
    groups: usize,
    inner: usize,
    share: usize,
    places: usize,
    taps: usize,
    positions: usize,
    geometry: Geometry,
}

impl ConvPlan<'_> {
    fn forward<T: Real>(&self, x: &View, w: &View, y: &View) -> Result<(), Error> {
        if self.geometry.pointwise() {
            return self.pointwise_forward::<T>(x, w, y);
        }
        if self.depthwise::<T>() {
            return self.depthwise_forward::<T>(x, w, y);
        }
        let depth = self.inner * self.taps;
        let w = self.flat(w, &[self.groups * self.share, depth])?;
        let image = self.image::<T>(x);
        // Positions of all images in one row, so that small images fill a block together.
        let total = self.batch * self.positions;
        let wanted = (2 * pool::threads()).div_ceil(self.groups);
        let block =
            (COLUMNS / (depth * size_of::<T>())).max(192).min(total.div_ceil(wanted).max(64)).min(total);
        // Whole strips of the product, which are read where they are.
        let block = if block < total { block / 32 * 32 } else { block };
        let blocks = total.div_ceil(block);
        let (pw, to) = (Ptr(w.ptr::<T>()), Ptr(y.ptr::<T>()));
        let work = size([total, depth, self.share, self.groups]);
        let scratch_len = size([depth + self.share, block]);
        self.share_out::<T>(work, self.groups * blocks, scratch_len, &|task, scratch| {
            let (g, from) = (task / blocks, task % blocks * block);
            let len = block.min(total - from);
            let columns = Ptr(scratch);
            self.rows(depth * len, depth, &|row| {
                // SAFETY: the scratch has a row of `len` for each of `depth`, and this one is this call's alone.
                let to = unsafe { columns.slice(row * len, len) };
                self.column_row(&image, g, row, from, to);
            });
            let (n, p) = (from / self.positions, from % self.positions);
            let a = Mat {
                ptr: pw.at((g * self.share) as isize * w.strides[0]),
                rs: w.strides[0],
                cs: w.strides[1],
            };
            let b = Mat { ptr: columns.0.cast_const(), rs: len as isize, cs: 1 };
            let at = |n: usize, p: usize| (n * self.groups + g) * self.share * self.positions + p;
            if p + len <= self.positions {
                let c = MatMut { ptr: to.at(at(n, p) as isize), rs: self.positions as isize, cs: 1 };
                // SAFETY: w's view and the columns are readable; the block of y is this task's alone.
                return unsafe { gemm::<T>(self.share, len, depth, a, b, c) };
            }
            // SAFETY: the scratch behind the columns holds share · len.
            let sums = unsafe { scratch.add(depth * block) };
            // SAFETY: as above.
            unsafe { gemm::<T>(self.share, len, depth, a, b, MatMut { ptr: sums, rs: len as isize, cs: 1 }) };
            for o in 0..self.share {
                // SAFETY: row o of the sums was written.
                let row = unsafe { std::slice::from_raw_parts(sums.add(o * len), len) };
                self.images(from, len, |at_row, n, p, count| {
                    // SAFETY: these positions of y are this task's alone.
                    let to = unsafe { to.slice(at(n, p) + o * self.positions, count) };
                    to.copy_from_slice(&row[at_row..at_row + count]);
                });
            }
        })
    }

    fn pointwise_forward<T: Real>(&self, x: &View, w: &View, y: &View) -> Result<(), Error> {
        let w = self.flat(w, &[self.groups * self.share, self.inner])?;
        let x = self.flat(x, &[self.batch, self.groups * self.inner, self.positions])?;
        let (px, pw, to) = (Ptr(x.ptr::<T>()), Ptr(w.ptr::<T>()), Ptr(y.ptr::<T>()));
        let work = size([self.batch, self.groups, self.share, self.inner, self.positions]);
        self.share_out::<T>(work, self.batch * self.groups, 0, &|task, _| {
            let (n, g) = (task / self.groups, task % self.groups);
            let a = Mat {
                ptr: pw.at((g * self.share) as isize * w.strides[0]),
                rs: w.strides[0],
                cs: w.strides[1],
            };
            let at = n as isize * x.strides[0] + (g * self.inner) as isize * x.strides[1];
            let b = Mat { ptr: px.at(at), rs: x.strides[1], cs: x.strides[2] };
            let c = MatMut {
                ptr: to.at((task * self.share * self.positions) as isize),
                rs: self.positions as isize,
                cs: 1,
            };
            // SAFETY: strides are those of views of w and x; the outputs of an image's group are this task's alone.
            unsafe { gemm::<T>(self.share, self.positions, self.inner, a, b, c) };
        })
    }

    fn weight<T: Real>(&self, x: &View, w: &View, y: &View) -> Result<(), Error> {
        if self.depthwise::<T>() {
            return self.depthwise_weight::<T>(x, w, y);
        }
        let depth = self.inner * self.taps;
        let total = self.batch * self.positions;
        let y = self.flat(y, &[self.batch, self.groups * self.share, self.positions])?;
        let image = self.image::<T>(x);
        let (py, to) = (Ptr(y.ptr::<T>()), Ptr(w.ptr::<T>()));
        // Rows of columns that one task takes through the whole of K.
        let wanted = (2 * pool::threads()).div_ceil(self.groups);
        let most = COLUMNS / (PANEL * size_of::<T>());
        let block = depth.div_ceil(wanted).max(32).min(most).min(depth);
        let blocks = depth.div_ceil(block);
        let work = size([total, depth, self.share, self.groups]);
        let sizes = [size([block, PANEL]), size([self.share, PANEL]), size([self.share, block])];
        let scratch_len = sizes.iter().fold(0, |scratch_len: usize, &part| scratch_len.saturating_add(part));
        self.share_out::<T>(work, self.groups * blocks, scratch_len, &|task, scratch| {
            let (g, first) = (task / blocks, task % blocks * block);
            let rows = block.min(depth - first);
            // SAFETY: the scratch holds the three parts.
            let (columns, lines, sums) =
                unsafe { (Ptr(scratch), Ptr(scratch.add(sizes[0])), Ptr(scratch.add(sizes[0] + sizes[1]))) };
            for from in (0..total).step_by(PANEL) {
                stop::check();
                let len = PANEL.min(total - from);
                self.rows(rows * len, rows, &|row| {
                    // SAFETY: the scratch has a row of `len` for each of `rows`, and this one is this call's alone.
                    let to = unsafe { columns.slice(row * len, len) };
                    self.column_row(&image, g, first + row, from, to);
                });
                let (n, p) = (from / self.positions, from % self.positions);
                let at = |n: usize, p: usize| {
                    n as isize * y.strides[0]
                        + (g * self.share) as isize * y.strides[1]
                        + p as isize * y.strides[2]
                };
                let a = if p + len <= self.positions {
                    Mat { ptr: py.at(at(n, p)).cast_const(), rs: y.strides[1], cs: y.strides[2] }
                } else {
                    for o in 0..self.share {
                        // SAFETY: the scratch holds a line of a panel for each output.
                        let line = unsafe { lines.slice(o * len, len) };
                        self.images(from, len, |at_line, n, p, count| {
                            let from = py.at(at(n, p) + o as isize * y.strides[1]);
                            // SAFETY: these positions are in y's view.
                            unsafe { copy(from, y.strides[2], &mut line[at_line..at_line + count]) };
                        });
                    }
                    Mat { ptr: lines.0.cast_const(), rs: len as isize, cs: 1 }
                };
                let b = Mat { ptr: columns.0.cast_const(), rs: 1, cs: len as isize };
                let out = to.at((g * self.share * depth + first) as isize);
                if from == 0 {
                    // SAFETY: y's view and the columns are readable; these rows of w are this task's alone.
                    unsafe {
                        gemm::<T>(self.share, rows, len, a, b, MatMut { ptr: out, rs: depth as isize, cs: 1 })
                    };
                    continue;
                }
                // SAFETY: as above; the sums lie in the scratch.
                unsafe {
                    gemm::<T>(self.share, rows, len, a, b, MatMut { ptr: sums.0, rs: rows as isize, cs: 1 })
                };
                for o in 0..self.share {
                    // SAFETY: the sums were written; these rows of w are this task's alone.
                    unsafe { add(Ptr(out).slice(o * depth, rows), sums.slice(o * rows, rows)) };
                }
            }
        })
    }

    fn input<T: Real>(&self, x: &View, w: &View, y: &View) -> Result<(), Error> {
        let depth = self.inner * self.taps;
        let w = self.flat(w, &[self.groups * self.share, depth])?;
        let y = self.flat(y, &[self.batch, self.groups * self.share, self.positions])?;
        let (pw, py, to) = (Ptr(w.ptr::<T>()), Ptr(y.ptr::<T>()), Ptr(x.ptr::<T>()));
        if self.depthwise::<T>() && self.share == 1 && y.strides[2] == 1 {
            return self.depthwise_input::<T>(x, &w, &y);
        }
        let pointwise = self.geometry.pointwise();
        // A task makes all columns of some channels for a slab of x, so that each element of x is summed by one task.
        // Slabs share some columns, so they are cut only where a few channels alone are too many.
        let one = size([self.taps, self.positions, size_of::<T>()]);
        let few = 96usize.div_ceil(self.taps).min(self.inner);
        let wanted = (2 * pool::threads()).div_ceil(self.batch * self.groups);
        let least = size([few, one]);
        let (channels, slabs) = if pointwise {
            (self.inner, 1)
        } else if least <= 2 * COLUMNS {
            ((2 * COLUMNS / one).min(self.inner.div_ceil(wanted)).max(few), 1)
        } else {
            (few, least.div_ceil(2 * COLUMNS).min(self.geometry.lead()))
        };
        let blocks = self.inner.div_ceil(channels);
        let thick = self.geometry.lead().div_ceil(slabs);
        let most =
            (0..slabs).map(|s| self.geometry.reached(s * thick, (s + 1) * thick).len()).max().unwrap_or(0);
        let scratch_len = if pointwise { 0 } else { size([channels, self.taps, most]) };
        let work = size([self.batch, self.groups, self.share, depth, self.positions]);
        self.share_out::<T>(work, self.batch * self.groups * blocks * slabs, scratch_len, &|task, scratch| {
            let (outer, slab) = (task / slabs, task % slabs);
            let (image, first) = (outer / blocks, outer % blocks * channels);
            let (n, g) = (image / self.groups, image % self.groups);
            let count = channels.min(self.inner - first);
            let plane = (image * self.inner + first) * self.places;
            let seen = self.geometry.reached(slab * thick, (slab + 1) * thick);
            let (rows, len) = (count * self.taps, seen.len());
            let at_w = (g * self.share) as isize * w.strides[0] + (first * self.taps) as isize * w.strides[1];
            let at_y = n as isize * y.strides[0]
                + (g * self.share) as isize * y.strides[1]
                + seen.start as isize * y.strides[2];
            let a = Mat { ptr: pw.at(at_w).cast_const(), rs: w.strides[1], cs: w.strides[0] };
            let b = Mat { ptr: py.at(at_y).cast_const(), rs: y.strides[1], cs: y.strides[2] };
            if pointwise {
                let c = MatMut { ptr: to.at(plane as isize), rs: self.places as isize, cs: 1 };
                // SAFETY: strides are those of views of w and y; the channels of an image are this task's alone.
                unsafe { gemm::<T>(rows, len, self.share, a, b, c) };
                // SAFETY: as above. A sum that underflowed to -0 is 0 once it is added to 0.
                return unsafe { to.slice(plane, rows * len) }.iter_mut().for_each(|x| *x += T::default());
            }
            let columns = Ptr(scratch);
            // SAFETY: as above; the columns lie in the scratch.
            unsafe {
                gemm::<T>(rows, len, self.share, a, b, MatMut { ptr: columns.0, rs: len as isize, cs: 1 })
            };
            self.rows(rows * len, count, &|c| {
                let slab = self.geometry.slab(slab * thick, (slab + 1) * thick);
                // SAFETY: this slab of channel `first + c` is this call's alone.
                let x = unsafe { to.slice(plane + c * self.places + slab.start, slab.len()) };
                // SAFETY: the rows were written by the product.
                let rows = unsafe { columns.slice(c * self.taps * len, self.taps * len) };
                add_columns(&self.geometry, seen.clone(), slab.start, rows, x);
            });
        })
    }

    /// Row `row` of the columns of group `g`, for the places from `from` on of all images' y.
    fn column_row<T: Real>(&self, image: &Image<T>, g: usize, row: usize, from: usize, to: &mut [T]) {
        let (c, tap) = (g * self.inner + row / self.taps, row % self.taps);
        self.images(from, to.len(), |at, n, p, count| {
            let plane = image.base.at(n as isize * image.batch + c as isize * image.channel);
            // SAFETY: the plane's elements are those of x's view.
            unsafe { self.geometry.gather(tap, p, plane, image.strides, &mut to[at..at + count]) };
        });
    }

    /// Calls `f(at, n, p, count)` for the images that the places `from..from + len` of all images fall in.
    fn images(&self, from: usize, len: usize, mut f: impl FnMut(usize, usize, usize, usize)) {
        let mut at = 0;
        while at < len {
            let (n, p) = ((from + at) / self.positions, (from + at) % self.positions);
            let count = (self.positions - p).min(len - at);
            f(at, n, p, count);
            at += count;
        }
    }

    /// Runs `f(0..rows)`, which touch `elements` in all; in parallel where that pays and a caller does not do so.
    fn rows(&self, elements: usize, rows: usize, f: &(dyn Fn(usize) + Sync)) {
        if elements < SMALL { (0..rows).for_each(f) } else { pool::parallel(rows, f) }
    }

    /// Runs `f(task, scratch)` for all tasks with `scratch_len` elements of scratch, on all threads if there are enough tasks
    /// for them. Otherwise tasks run one by one and share out their own work.
    fn share_out<T: Real>(
        &self,
        work: usize,
        tasks: usize,
        scratch_len: usize,
        f: &(dyn Fn(usize, *mut T) + Sync),
    ) -> Result<(), Error> {
        let threads = pool::threads();
        let lanes = if tasks < threads || work < SMALL { 1 } else { threads };
        let scratch = self.cx.fresh(Meta::new(T::DTYPE, [size([lanes, scratch_len])]))?;
        let base = Ptr(scratch.ptr::<T>());
        let next = AtomicUsize::new(0);
        pool::parallel(lanes, &|lane| {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    return;
                }
                stop::check();
                f(task, base.at((lane * scratch_len) as isize));
            }
        });
        Ok(())
    }

    fn image<T: Real>(&self, x: &View) -> Image<T> {
        let mut strides = [0; 3];
        strides[5 - x.shape.len()..].copy_from_slice(&x.strides[2..]);
        Image { base: Ptr(x.ptr()), batch: x.strides[0], channel: x.strides[1], strides }
    }

    /// The view under another shape; copied if its strides cannot express that.
    fn flat(&self, x: &View, shape: &[usize]) -> Result<View, Error> {
        let shape = Shape::from(shape);
        match x.reshaped(&shape) {
            Some(view) => Ok(view),
            None => Ok(self.cx.dense(x)?.reshaped(&shape).expect("a row-major view takes any shape")),
        }
    }
}

/// A product of extents that no value need have: what is too large stays too large.
fn size<const N: usize>(extents: [usize; N]) -> usize {
    extents.iter().fold(1, |size: usize, &extent| size.saturating_mul(extent))
}

/// x with its strides.
struct Image<T> {
    base: Ptr<T>,
    batch: isize,
    channel: isize,
    strides: [isize; 3],
}

/// An address that tasks share: they read operands, and write parts of results and scratch of their own.
struct Ptr<T>(*mut T);

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Ptr<T> {
        *self
    }
}
impl<T> Copy for Ptr<T> {}
// SAFETY: see the type; what is written is disjoint.
unsafe impl<T: Send> Send for Ptr<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Ptr<T> {}

impl<T> Ptr<T> {
    fn at(&self, offset: isize) -> *mut T {
        self.0.wrapping_offset(offset)
    }

    /// # Safety
    /// The range lies in the memory, and nobody else uses it meanwhile.
    unsafe fn slice<'a>(&self, from: usize, len: usize) -> &'a mut [T] {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(from), len) }
    }
}

/// Reads elements that lie `stride` apart.
///
/// # Safety
/// `to.len()` elements are readable there.
unsafe fn copy<T: Copy>(from: *const T, stride: isize, to: &mut [T]) {
    if stride == 1 {
        // SAFETY: promised by the caller; `to` is borrowed mutably, so they do not overlap.
        return unsafe { to.as_mut_ptr().copy_from_nonoverlapping(from, to.len()) };
    }
    for (i, x) in to.iter_mut().enumerate() {
        // SAFETY: promised by the caller.
        *x = unsafe { *from.offset(i as isize * stride) };
    }
}

versions! {
    /// The sums of a channel's columns, for the places `seen` of y, over a slab of x that begins at place `start`.
    fn add_columns<T: Real>(geometry: &Geometry, seen: Range<usize>, start: usize, columns: &[T], x: &mut [T]) =
        add_columns_body;
}

#[inline(always)]
fn add_columns_body<T: Real>(
    geometry: &Geometry,
    seen: Range<usize>,
    start: usize,
    columns: &[T],
    x: &mut [T],
) {
    x.fill(T::default());
    if seen.is_empty() {
        return;
    }
    for (tap, row) in columns.chunks(seen.len()).enumerate() {
        geometry.scatter(tap, seen.clone(), start, row, x, |x, v| *x += v);
    }
}

fn add<T: Real>(to: &mut [T], from: &[T]) {
    to.iter_mut().zip(from).for_each(|(to, &from)| *to += from);
}
