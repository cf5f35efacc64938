//! Passes as machine code, for x86-64 with AVX-512 or AVX2.
//!
//! A pass becomes lane operations (`lower.rs`, from the tables by `symbol.rs`), these get registers and instructions
//! (`body.rs`), around them come loops (`assemble.rs`), and the bytes go to pages of their own (`pages.rs`). Every
//! operation is the one that the loops of `slices` do, in the same order, so the bits are equal. A pass with anything
//! that has no form here is left to the interpreter.

mod assemble;
mod asm;
mod body;
mod cache;
mod graph;
mod lower;
mod pages;
mod symbol;
#[doc(hidden)]
pub mod trial;
#[cfg(test)]
mod tests;

use crate::fused::pass::{Output, Pass};
use crate::gemm::Isa;
use crate::reference::order::INNER;
use graph::Target;
use kiln_ir::ReduceKind;
use kiln_ir::math::Num;
use pages::Pages;
use smallvec::SmallVec;
use std::sync::Arc;

/// A compiled pass.
pub(crate) struct Code {
    pages: Pages,
    pool: Vec<u32>,
    target: Target,
    /// Bytes from one element to the next behind each address; 0 for a splat, or lanes of a fold.
    strides: SmallVec<[u8; 8]>,
    /// The addresses that are of folds.
    folds: SmallVec<[(usize, FoldRule); 2]>,
    inputs: usize,
    bytes: usize,
}

/// What a fold begins with, and how a lane takes an element.
type FoldRule = (f32, fn(f32, f32) -> f32);

/// The rule of a kind, if it has one here.
fn rule(kind: ReduceKind) -> Option<FoldRule> {
    Some(match kind {
        ReduceKind::Sum | ReduceKind::Mean => (0.0, Num::add),
        ReduceKind::Prod => (1.0, Num::mul),
        ReduceKind::Max => (f32::NEG_INFINITY, Num::maximum),
        ReduceKind::Min => (f32::INFINITY, Num::minimum),
        ReduceKind::Any | ReduceKind::All | ReduceKind::ArgMax | ReduceKind::ArgMin => return None,
    })
}

/// What the code is: addresses, elements, constants.
type Entry = unsafe extern "sysv64" fn(*const *mut u8, usize, *const u32);

/// The pass as code for this machine, from the cache if it was seen before.
pub(crate) fn compile(pass: &Pass) -> Option<Arc<Code>> {
    let target = match crate::gemm::isa() {
        Isa::Avx512 if is_x86_feature_detected!("bmi2") => Target::Avx512,
        Isa::Avx512 | Isa::Interp => return None,
        Isa::Avx2 if is_x86_feature_detected!("f16c") => Target::Avx2,
        Isa::Avx2 => return None,
    };
    cache::find(pass, target)
}

impl Code {
    /// The pass as code for `target`, if all of it can be.
    fn new(pass: &Pass, target: Target) -> Option<Code> {
        let lowered = lower::lower(pass, target)?;
        let listed = kiln_env::CODE.is_on();
        let assembled = assemble::assemble(&lowered, listed)?;
        if let Some(listing) = assembled.listing {
            cache::print(pass, target, &listing);
        }
        let pool = match target {
            Target::Avx512 => assembled.pool,
            Target::Avx2 => assembled.pool.into_iter().flat_map(|bits| [bits; 8]).collect(),
        };
        let inputs = pass.inputs.iter().map(|input| if input.splat { 0 } else { input.dtype.size() as u8 });
        let mut strides: SmallVec<[u8; 8]> = inputs.collect();
        strides.resize(strides.len() + pass.outputs.len(), 0);
        lowered.stores.iter().for_each(|store| strides[store.to as usize] = store.form.size() as u8);
        let folded = |(i, output): (usize, &Output)| match *output {
            Output::Fold { kind, .. } => Some((pass.inputs.len() + i, rule(kind)?)),
            Output::Store { .. } => None,
        };
        let bytes = assembled.bytes.len() + pool.len() * 4;
        Some(Code {
            pages: Pages::new(&assembled.bytes)?,
            pool,
            target,
            strides,
            folds: pass.outputs.iter().enumerate().filter_map(folded).collect(),
            inputs: pass.inputs.len(),
            bytes,
        })
    }

    /// Runs the pass over `len` elements. Addresses are those of the inputs, then of the outputs.
    ///
    /// # Safety
    /// Each input holds `len` elements of its type, or one if it is a splat; each stored output has room for `len`, each
    /// fold for 16 f32 for each 512 elements or part of them. An output may be an input's own memory if both have
    /// elements of one size, but overlaps none otherwise. Stores past the cache are seen by other threads only after a
    /// fence, which is the caller's.
    pub unsafe fn run(&self, addresses: &[*mut u8], len: usize) {
        // SAFETY: the pages hold a function of this type, which stays while `self` is borrowed.
        let entry: Entry = unsafe { std::mem::transmute(self.pages.start()) };
        match self.target {
            // SAFETY: promised by the caller.
            Target::Avx512 => unsafe { entry(addresses.as_ptr(), len, self.pool.as_ptr()) },
            Target::Avx2 => {
                let lanes = if self.folds.is_empty() { self.target.lanes() } else { INNER.lanes };
                let rest = len % lanes;
                // SAFETY: promised by the caller.
                unsafe { entry(addresses.as_ptr(), len - rest, self.pool.as_ptr()) };
                if rest > 0 {
                    // SAFETY: as above.
                    unsafe { self.run_rest(entry, addresses, len - rest, rest, lanes) };
                }
            }
        }
    }

    /// The last elements, fewer than a vector or the lanes of a fold: in memory of our own, from and to which they are
    /// copied.
    ///
    /// # Safety
    /// As for [`Code::run`], with elements `from..from + rest`.
    unsafe fn run_rest(&self, entry: Entry, addresses: &[*mut u8], from: usize, rest: usize, lanes: usize) {
        /// Aligned as stores past the cache want it.
        #[derive(Clone, Copy)]
        #[repr(align(64))]
        struct Vector([u8; 64]);
        let mut padded: SmallVec<[Vector; 8]> = SmallVec::from_elem(Vector([0; 64]), addresses.len());
        let mut own: SmallVec<[*mut u8; 8]> = SmallVec::new();
        for (i, (&address, &stride)) in addresses.iter().zip(&self.strides).enumerate() {
            let to = padded[i].0.as_mut_ptr();
            let (stride, input) = (stride as usize, i < self.inputs);
            if input && stride > 0 {
                // SAFETY: the elements are there, and a vector of them fits.
                unsafe { std::ptr::copy_nonoverlapping(address.add(from * stride), to, rest * stride) };
            }
            own.push(if input && stride == 0 { address } else { to });
        }
        // SAFETY: every address has a vector of elements.
        unsafe { entry(own.as_ptr(), lanes, self.pool.as_ptr()) };
        for i in self.inputs..addresses.len() {
            let stride = self.strides[i] as usize;
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(own[i], addresses[i].add(from * stride), rest * stride) };
        }
        for &(i, (identity, combined)) in &self.folds {
            // SAFETY: as above; a fold has lanes for this chunk.
            let (lanes, more) = unsafe {
                let lanes = addresses[i].cast::<[f32; INNER.lanes]>().add(from / INNER.chunk);
                (&mut *lanes, &*own[i].cast::<[f32; INNER.lanes]>())
            };
            if from.is_multiple_of(INNER.chunk) {
                lanes.fill(identity);
            }
            for (lane, &x) in lanes.iter_mut().zip(&more[..rest]) {
                // An identity combined with x is x.
                *lane = combined(*lane, x);
            }
        }
    }
}
