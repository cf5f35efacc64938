//! What fused programs are made of: tiles of scratch, operands brought into them, and one loop over tiles for each
//! instruction. All addresses are raw here; whoever calls says why they are right.

use crate::arena::{Buffer, GUARD};
use crate::convert::{Plain, convert, truth};
use crate::cpu::Context;
use crate::elementwise::with_type;
use crate::memory;
use crate::slices;
use crate::tile::TILE;
use crate::view::{View, Walk};
use half::{bf16, f16};
use kiln_device::Place;
use kiln_fuse::Handles;
use kiln_ir::{Binary, DType, Domain, Id, Meta, Node, Op, Unary, infer_binary, infer_unary};
use std::cell::Cell;

/// An elementwise operation with its types.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Call {
    pub op: Kernel,
    /// The type of its operands; a select's condition aside.
    pub from: DType,
    pub to: DType,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Kernel {
    Unary(Unary),
    Binary(Binary),
    Select,
    Cast,
}

impl Call {
    /// The call for a node on operands of these dtypes. Nothing if it is not elementwise, or not defined for them: what
    /// reads and writes by a call relies on `from` being the dtype of every operand and `to` what comes of it.
    pub fn new(node: &Node, args: &[DType]) -> Option<Call> {
        let &from = args.last()?;
        let scalar = Meta::new(from, []);
        let (op, to) = match (&node.op, args) {
            (Op::Unary(op), [_]) => (Kernel::Unary(*op), infer_unary(*op, &scalar).ok()?.dtype),
            (Op::Binary(op), [a, _]) if *a == from => return Call::binary(*op, from),
            // A commit is a choice by one bool for all.
            (Op::Select | Op::Commit, [DType::Bool, a, _]) if *a == from => (Kernel::Select, from),
            (Op::Cast(to), [_]) => (Kernel::Cast, *to),
            // Elsewhere than at its indices it adds nothing.
            (Op::Scatter { .. }, [a, _]) if *a == from => return Call::binary(Binary::Add, from),
            _ => return None,
        };
        (!from.is_quantised() && !to.is_quantised()).then_some(Call { op, from, to })
    }

    fn binary(op: Binary, from: DType) -> Option<Call> {
        let scalar = Meta::new(from, []);
        let to = infer_binary(op, &scalar, &scalar).ok()?.dtype;
        Some(Call { op: Kernel::Binary(op), from, to })
    }
}

/// Whether an elementwise node can be part of a fused program.
pub(super) fn is_fusible(node: &Node, dtypes: impl Fn(Id) -> DType) -> bool {
    let plain = node.ins.iter().chain(&node.outs).all(|&id| !dtypes(id).is_quantised());
    match &node.op {
        // Only a lone node can tell which of its elements failed.
        Op::Binary(op) if op.divides() => plain && !dtypes(node.ins[0]).is_int(),
        Op::Unary(_) | Op::Binary(_) | Op::Select | Op::Commit | Op::Cast(_) => plain,
        _ => false,
    }
}

/// An address that threads may share: each uses its own tiles behind it.
#[derive(Clone, Copy)]
pub(super) struct Base(pub *mut u8);
impl Base {
    /// The address so many bytes on.
    pub fn plus(self, bytes: usize) -> *mut u8 {
        self.0.wrapping_add(bytes)
    }
}
// SAFETY: tiles of different threads are disjoint.
unsafe impl Sync for Base {}
// SAFETY: as above.
unsafe impl Send for Base {}

/// Whether a result may take the place of a value that ends here.
pub(super) fn replaceable(cx: &Context<'_>, handles: &dyn Handles<View>, id: Id, out: Meta) -> bool {
    handles.get(id).is_some_and(|x| {
        let fits = x.shape == out.shape && x.dtype.size() == out.dtype.size() && x.is_dense();
        fits && x.buffer.is_sole() && cx.place == Place::Reuse
    })
}

thread_local! {
    static OWN: Cell<Option<Buffer>> = const { Cell::new(None) };
    static SHARED: Cell<Option<Buffer>> = const { Cell::new(None) };
}

/// Bytes of scratch that a thread keeps, and that nobody reserves.
pub(super) const KEPT: usize = 2 << 20;
/// The least that is taken, so that it need not grow often.
const LEAST: usize = 64 << 10;

/// Calls `f` with this thread's scratch of at least that many bytes, aligned to a cache line.
pub(super) fn with_scratch(bytes: usize, f: impl FnOnce(*mut u8)) {
    memory::with_scratch(&OWN, at_least(bytes), KEPT, f);
}

/// Like [`with_scratch`], with memory that stays while others use their scratch.
pub(super) fn with_shared(bytes: usize, f: impl FnOnce(*mut u8)) {
    memory::with_scratch(&SHARED, at_least(bytes), KEPT, f);
}

fn at_least(bytes: usize) -> usize {
    if *GUARD { bytes } else { bytes.max(LEAST) }
}

/// Fills a tile with one element.
pub(super) fn splat(to: *mut u8, bytes: &[u8], len: usize) {
    macro_rules! fill {
        ($($t:ty)*) => {
            match bytes.len() {
                $(n if n == size_of::<$t>() => {
                    let mut raw = [0; size_of::<$t>()];
                    raw.copy_from_slice(bytes);
                    // SAFETY: the tile holds TILE elements of eight bytes and is aligned for them.
                    unsafe { std::slice::from_raw_parts_mut(to.cast::<$t>(), len) }.fill(<$t>::from_le_bytes(raw));
                })*
                other => unreachable!("no element has {other} bytes"),
            }
        };
    }
    fill!(u8 u16 u32 u64)
}

/// Brings the elements `from..from + len` of an operand into scratch.
///
/// # Safety
/// `to` has room for `len` aligned elements; the walk's elements lie at `base`, and nobody writes them meanwhile.
pub(super) unsafe fn gather(dtype: DType, walk: &Walk, base: *mut u8, to: *mut u8, from: usize, len: usize) {
    with_type!(dtype, plain T => {
        // SAFETY: promised by the caller.
        let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<T>(), len) };
        walk.runs(from, len, |at, offset, count, stride| {
            let base = base.cast::<T>().wrapping_offset(offset).cast_const();
            let to = &mut to[at..at + count];
            match stride {
                // SAFETY: promised by the caller.
                0 => to.fill(unsafe { *base }),
                // SAFETY: as above, for `count` neighbours.
                1 => to.copy_from_slice(unsafe { std::slice::from_raw_parts(base, count) }),
                _ => to.iter_mut().enumerate().for_each(|(i, x)| {
                    // SAFETY: as above.
                    *x = unsafe { *base.wrapping_offset(i as isize * stride) }
                }),
            }
        });
    })
}

/// Runs one instruction over a tile.
///
/// # Safety
/// Each address holds `len` aligned elements of its type, and `out` shares memory with no operand.
pub(crate) unsafe fn kernel(op: &Call, args: &[*const u8], out: *mut u8, len: usize) {
    unsafe fn read<'a, T>(x: *const u8, len: usize) -> &'a [T] {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts(x.cast(), len) }
    }
    unsafe fn write<'a, T>(x: *mut u8, len: usize) -> &'a mut [T] {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(x.cast(), len) }
    }
    macro_rules! run {
        ($group:ident, $D:ty, $f:path, $kind:expr, $($arg:expr),*) => {
            with_type!(op.from, $group T => {
                // SAFETY: promised by the caller.
                unsafe { $f($kind, $(read::<T>($arg, len),)* write::<$D>(out, len)) }
            })
        };
    }
    match op.op {
        Kernel::Unary(kind) => match kind.domain() {
            Domain::Float => run!(float, T, slices::unary_float, kind, args[0]),
            Domain::Num => run!(number, T, slices::unary_num, kind, args[0]),
            Domain::Test => run!(number, u8, slices::unary_test, kind, args[0]),
            Domain::Bits if op.from == DType::Bool => {
                // SAFETY: promised by the caller.
                unsafe { slices::flip(read(args[0], len), write(out, len)) }
            }
            Domain::Bits => run!(integer, T, slices::unary_bits, kind, args[0]),
            Domain::Compare => unreachable!("comparisons take two operands"),
        },
        Kernel::Binary(kind) => match kind.domain() {
            Domain::Float => run!(float, T, slices::binary_float, kind, args[0], args[1]),
            Domain::Num => run!(number, T, slices::binary_num, kind, args[0], args[1]),
            Domain::Compare => run!(plain, u8, slices::binary_compare, kind, args[0], args[1]),
            Domain::Bits => run!(integer, T, slices::binary_bits, kind, args[0], args[1]),
            Domain::Test => unreachable!("tests take one operand"),
        },
        Kernel::Select => with_type!(op.from, plain T => {
            // SAFETY: promised by the caller.
            unsafe { slices::select(read(args[0], len), read::<T>(args[1], len), read::<T>(args[2], len), write(out, len)) }
        }),
        Kernel::Cast => with_type!(op.from, plain S => {
            let mut converted = [<S as Plain>::Kind::default(); TILE];
            // SAFETY: promised by the caller.
            let tile = S::kind(unsafe { read::<S>(args[0], len) }, &mut converted[..len]);
            match op.to {
                // SAFETY: promised by the caller.
                DType::Bool => truth(tile, unsafe { write(out, len) }),
                // SAFETY: promised by the caller.
                to => with_type!(to, number D => convert(tile, unsafe { write::<D>(out, len) })),
            }
        }),
    }
}
