//! Elementwise operations on views.

use crate::convert::{Kind, Plain, convert, truth};
use crate::cpu::Context;
use crate::slices;
use crate::tile::{Out, TILE, TileSource, tiles};
use crate::view::View;
use half::{bf16, f16};
use kiln_device::Error;
use kiln_host::Arg;
use kiln_ir::math::DivideError;
use kiln_ir::{Binary, DType, Domain, Meta, Unary};
use std::sync::Mutex;

/// Runs `$body` with `$T` as the Rust type of a dtype from the named group.
macro_rules! with_type {
    ($dtype:expr, float $T:ident => $body:expr) => {
        with_type!(@match $dtype, $T => $body; F64 f64, F32 f32, F16 f16, BF16 bf16)
    };
    ($dtype:expr, number $T:ident => $body:expr) => {
        with_type!(@match $dtype, $T => $body; F64 f64, F32 f32, F16 f16, BF16 bf16, I64 i64, I32 i32, I16 i16, I8 i8,
            U64 u64, U32 u32, U16 u16, U8 u8)
    };
    ($dtype:expr, integer $T:ident => $body:expr) => {
        with_type!(@match $dtype, $T => $body; I64 i64, I32 i32, I16 i16, I8 i8, U64 u64, U32 u32, U16 u16, U8 u8, Bool u8)
    };
    ($dtype:expr, plain $T:ident => $body:expr) => {
        with_type!(@match $dtype, $T => $body; F64 f64, F32 f32, F16 f16, BF16 bf16, I64 i64, I32 i32, I16 i16, I8 i8,
            U64 u64, U32 u32, U16 u16, U8 u8, Bool u8)
    };
    (@match $dtype:expr, $T:ident => $body:expr; $($variant:ident $t:ty),*) => {
        match $dtype {
            $(DType::$variant => { type $T = $t; $body })*
            #[allow(unreachable_patterns)]
            other => unreachable!("{other} was refused by infer"),
        }
    };
}
pub(crate) use with_type;

pub(crate) fn unary(cx: &Context<'_>, op: Unary, ins: &mut [Arg<View>], out: Meta) -> Result<View, Error> {
    let (target, taken) = target(cx, ins, out)?;
    let x = &*ins[0];
    let n = out.shape.numel();
    match op.domain() {
        Domain::Float => {
            with_type!(x.dtype, float T => map::<T, T>(x, taken == Some(0), &target, n, &|x, y| slices::unary_float(op, x, y)))
        }
        Domain::Num => {
            with_type!(x.dtype, number T => map::<T, T>(x, taken == Some(0), &target, n, &|x, y| slices::unary_num(op, x, y)))
        }
        Domain::Test => {
            with_type!(x.dtype, number T => map::<T, u8>(x, taken == Some(0), &target, n, &|x, y| slices::unary_test(op, x, y)))
        }
        Domain::Bits if x.dtype == DType::Bool => map::<u8, u8>(x, taken == Some(0), &target, n, &|x, y| {
            slices::binary_bits(Binary::Xor, x, &ONES[..x.len()], y)
        }),
        Domain::Bits => {
            with_type!(x.dtype, integer T => map::<T, T>(x, taken == Some(0), &target, n, &|x, y| slices::unary_bits(op, x, y)))
        }
        Domain::Compare => unreachable!("comparisons take two operands"),
    }
    Ok(target)
}

/// Flipping a bool is the exclusive or with 1.
static ONES: [u8; TILE] = [1; TILE];

pub(crate) fn binary(cx: &Context<'_>, op: Binary, ins: &mut [Arg<View>], out: Meta) -> Result<View, Error> {
    if op.divides() && ins[0].dtype.is_int() {
        check_divisors(op, &ins[0].expanded(&out.shape), &ins[1].expanded(&out.shape))?;
    }
    let (target, taken) = target(cx, ins, out)?;
    let (a, b) = (ins[0].expanded(&out.shape), ins[1].expanded(&out.shape));
    let n = out.shape.numel();
    match op.domain() {
        Domain::Float => {
            with_type!(a.dtype, float T => zip::<T, T>(&a, &b, taken, &target, n, &|a, b, y| slices::binary_float(op, a, b, y)))
        }
        Domain::Num => {
            with_type!(a.dtype, number T => zip::<T, T>(&a, &b, taken, &target, n, &|a, b, y| slices::binary_num(op, a, b, y)))
        }
        Domain::Compare => {
            with_type!(a.dtype, plain T => zip::<T, u8>(&a, &b, taken, &target, n, &|a, b, y| slices::binary_compare(op, a, b, y)))
        }
        Domain::Bits => {
            with_type!(a.dtype, integer T => zip::<T, T>(&a, &b, taken, &target, n, &|a, b, y| slices::binary_bits(op, a, b, y)))
        }
        Domain::Test => unreachable!("tests take one operand"),
    }
    Ok(target)
}

pub(crate) fn select(cx: &Context<'_>, ins: &mut [Arg<View>], out: Meta) -> Result<View, Error> {
    let (target, taken) = target(cx, ins, out)?;
    let [c, a, b] = [0, 1, 2].map(|i| ins[i].expanded(&out.shape));
    with_type!(out.dtype, plain T => {
        let (cond, a, b) = (source::<u8>(&c, taken == Some(0)), source::<T>(&a, taken == Some(1)), source::<T>(&b, taken == Some(2)));
        // SAFETY: `target` is fresh, or an operand whose tiles are copied out before they are written.
        let y = unsafe { Out::<T>::new(&target) };
        tiles(out.shape.numel(), &|from, len| {
            let (mut sc, mut sa, mut sb) = ([0u8; TILE], [T::default(); TILE], [T::default(); TILE]);
            let (cond, a, b) = (cond.tile(from, &mut sc[..len]), a.tile(from, &mut sa[..len]), b.tile(from, &mut sb[..len]));
            // SAFETY: tiles are disjoint and lie within the view.
            slices::select(cond, a, b, unsafe { y.range(from, len) });
        })
    });
    Ok(target)
}

pub(crate) fn cast(cx: &Context<'_>, ins: &mut [Arg<View>], out: Meta) -> Result<View, Error> {
    if ins[0].dtype == out.dtype {
        return Ok((*ins[0]).clone());
    }
    let (target, taken) = target(cx, ins, out)?;
    with_type!(ins[0].dtype, plain S => cast_from::<S>(&ins[0], taken == Some(0), &target));
    Ok(target)
}

fn cast_from<S: Plain + Sync>(x: &View, overwritten: bool, target: &View) {
    let x = source::<S>(x, overwritten);
    tiles(target.numel(), &|from, len| {
        let (mut scratch, mut converted) = ([S::default(); TILE], [S::Kind::default(); TILE]);
        let tile = S::kind(x.tile(from, &mut scratch[..len]), &mut converted[..len]);
        // SAFETY: `target` is fresh, or an operand whose tiles are copied out before they are written; tiles are
        // disjoint and lie within the view.
        unsafe { cast_tile(tile, target, from) };
    });
}

/// Converts one tile, to the elements of `target` from `from` on.
///
/// # Safety
/// As for [`Out::new`] and [`Out::range`].
unsafe fn cast_tile<K: Kind>(tile: &[K], target: &View, from: usize) {
    match target.dtype {
        // SAFETY: promised by the caller; a bool is a byte.
        DType::Bool => truth(tile, unsafe { Out::<u8>::new(target).range(from, tile.len()) }),
        to => with_type!(to, number D => {
            // SAFETY: promised by the caller.
            let out = unsafe { Out::<D>::new(target).range(from, tile.len()) };
            convert(tile, out)
        }),
    }
}

/// A row-major copy.
pub(crate) fn copy(cx: &Context<'_>, x: &View) -> Result<View, Error> {
    let target = cx.fresh(x.meta())?;
    write(x, &target);
    Ok(target)
}

/// Copies `x` over `to`, a part of a fresh or uniquely held value of the same shape and dtype.
pub(crate) fn write(x: &View, to: &View) {
    debug_assert_eq!(x.meta(), to.meta());
    with_type!(x.dtype, plain T => {
        let x = TileSource::<T>::new(x);
        let (walk, base) = (to.walk(), Target(to.ptr::<T>()));
        tiles(to.numel(), &|from, len| {
            let mut scratch = [T::default(); TILE];
            let tile = x.tile(from, &mut scratch[..len]);
            walk.runs(from, len, |at, offset, count, stride| {
                let run = &tile[at..at + count];
                // SAFETY: every offset of a view lies within its buffer; runs of one walk never meet, and nobody
                // else uses this buffer.
                unsafe {
                    if stride == 1 {
                        return base.at(offset).copy_from_nonoverlapping(run.as_ptr(), count);
                    }
                    for (i, &v) in run.iter().enumerate() {
                        base.at(offset + i as isize * stride).write(v);
                    }
                }
            });
        })
    });
}

struct Target<T>(*mut T);

impl<T> Target<T> {
    fn at(&self, offset: isize) -> *mut T {
        self.0.wrapping_offset(offset)
    }
}

// SAFETY: used for writes to disjoint places only.
unsafe impl<T: Send> Sync for Target<T> {}

/// Where the result goes: over an operand that ends here and has its layout, else to fresh memory. Also which operand.
fn target(cx: &Context<'_>, ins: &[Arg<View>], out: Meta) -> Result<(View, Option<usize>), Error> {
    for (i, arg) in ins.iter().enumerate() {
        if let Arg::Owned(x) = arg {
            let fits = x.shape == out.shape && x.dtype.size() == out.dtype.size() && x.is_dense();
            if fits && x.buffer.is_sole() && cx.place == kiln_device::Place::Reuse {
                return Ok((View { dtype: out.dtype, ..x.clone() }, Some(i)));
            }
        }
    }
    Ok((cx.fresh(out)?, None))
}

fn source<T: Copy + Default>(x: &View, overwritten: bool) -> TileSource<'_, T> {
    if overwritten { TileSource::copied(x) } else { TileSource::new(x) }
}

fn map<S: Copy + Default + Sync, D: Send>(
    x: &View,
    overwritten: bool,
    target: &View,
    n: usize,
    f: &(dyn Fn(&[S], &mut [D]) + Sync),
) {
    let x = source::<S>(x, overwritten);
    // SAFETY: `target` is fresh, or an operand whose tiles are copied out before they are written.
    let y = unsafe { Out::<D>::new(target) };
    tiles(n, &|from, len| {
        let mut scratch = [S::default(); TILE];
        // SAFETY: tiles are disjoint and lie within the view.
        f(x.tile(from, &mut scratch[..len]), unsafe { y.range(from, len) });
    });
}

/// A loop over tiles of two operands.
type Zip<'a, S, D> = dyn Fn(&[S], &[S], &mut [D]) + Sync + 'a;

fn zip<S: Copy + Default + Sync, D: Send>(
    a: &View,
    b: &View,
    taken: Option<usize>,
    target: &View,
    n: usize,
    f: &Zip<'_, S, D>,
) {
    let (a, b) = (source::<S>(a, taken == Some(0)), source::<S>(b, taken == Some(1)));
    // SAFETY: `target` is fresh, or an operand whose tiles are copied out before they are written.
    let y = unsafe { Out::<D>::new(target) };
    tiles(n, &|from, len| {
        let (mut sa, mut sb) = ([S::default(); TILE], [S::default(); TILE]);
        // SAFETY: tiles are disjoint and lie within the view.
        f(a.tile(from, &mut sa[..len]), b.tile(from, &mut sb[..len]), unsafe { y.range(from, len) });
    });
}

fn check_divisors(op: Binary, a: &View, b: &View) -> Result<(), Error> {
    let found: Mutex<Option<(usize, DivideError)>> = Mutex::new(None);
    with_type!(a.dtype, number T => {
        let (a_tiles, b_tiles) = (TileSource::<T>::new(a), TileSource::<T>::new(b));
        tiles(a.numel(), &|from, len| {
            let (mut sa, mut sb) = ([T::default(); TILE], [T::default(); TILE]);
            let checked = slices::check_divisors(op, a_tiles.tile(from, &mut sa[..len]), b_tiles.tile(from, &mut sb[..len]));
            if let Err(error) = checked {
                // The first one in order is told, whichever thread finds it.
                let mut found = found.lock().unwrap_or_else(|e| e.into_inner());
                if found.is_none_or(|(at, _)| from < at) {
                    *found = Some((from, error));
                }
            }
        })
    });
    match found.into_inner().unwrap_or_else(|e| e.into_inner()) {
        Some((_, error)) => Err(Error::Divide { op: op.name().into(), error }),
        None => Ok(()),
    }
}
