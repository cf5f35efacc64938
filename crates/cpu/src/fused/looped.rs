//! A [`Pass`] made ready to run: generated code where there is some, else tile by tile with the unfused loops, whose
//! bits are the same.

use super::kernel::{kernel, splat};
use super::pass::{Output, Pass};
use crate::reduction;
use crate::tile::TILE;
use kiln_ir::DType;
use smallvec::SmallVec;
use std::sync::Arc;

/// Bytes of a scratch tile: any element, and whole cache lines.
const SLOT: usize = TILE * 8;

#[cfg(target_arch = "x86_64")]
use crate::emit::{Code, compile};

/// Nothing here writes machine code.
#[cfg(not(target_arch = "x86_64"))]
enum Code {}

#[cfg(not(target_arch = "x86_64"))]
impl Code {
    unsafe fn run(&self, _: &[*mut u8], _: usize) {
        match *self {}
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn compile(_: &Pass) -> Option<Arc<Code>> {
    None
}

/// A pass that can run.
pub(super) struct Loop {
    code: Option<Arc<Code>>,
    pass: Pass,
    /// The dtype of each value.
    dtypes: Vec<DType>,
    /// The scratch tile of each value; inputs have one only if they are a single element, or stored.
    slots: Vec<u32>,
    tiles: u32,
    /// The inputs that are stored as they are. An earlier store may take their place, so they are copied before.
    copied: Vec<u32>,
    /// The output that each step can be written to directly.
    stored: Vec<Option<u32>>,
}

impl Loop {
    pub fn new(pass: Pass) -> Loop {
        let mut dtypes: Vec<DType> = pass.inputs.iter().map(|i| i.dtype).collect();
        dtypes.extend(pass.steps.iter().map(|s| s.call.to));
        let (inputs, steps) = (pass.inputs.len(), pass.steps.len());
        let mut stored = vec![None; steps];
        // Where each value is used last; what leaves is needed until the end of a tile.
        let mut last: Vec<usize> = (0..inputs + steps).map(|v| v.saturating_sub(inputs)).collect();
        for (at, step) in pass.steps.iter().enumerate() {
            step.args.iter().for_each(|&arg| last[arg as usize] = at);
        }
        for (k, output) in pass.outputs.iter().enumerate() {
            let (Output::Store { value, .. } | Output::Fold { value, .. }) = *output;
            last[value as usize] = steps;
            if let (Output::Store { .. }, Some(step)) = (output, (value as usize).checked_sub(inputs)) {
                stored[step].get_or_insert(k as u32);
            }
        }
        let (mut slots, mut free, mut tiles) = (vec![0; inputs + steps], Vec::new(), 0);
        let mut take = |free: &mut Vec<u32>| {
            free.pop().unwrap_or_else(|| {
                tiles += 1;
                tiles - 1
            })
        };
        for (input, slot) in pass.inputs.iter().zip(&mut slots) {
            if input.splat {
                *slot = take(&mut free);
            }
        }
        let mut copied: Vec<u32> = Vec::new();
        for output in &pass.outputs {
            let Output::Store { value, .. } = *output else { continue };
            let is_vector = pass.inputs.get(value as usize).is_some_and(|input| !input.splat);
            if is_vector && !copied.contains(&value) {
                slots[value as usize] = take(&mut free);
                copied.push(value);
            }
        }
        let mut busy: Vec<(usize, u32)> = Vec::new();
        for at in 0..steps {
            // A tile is free again only after the step that reads it last: results never share one with operands.
            busy.retain(|&(until, slot)| {
                if until < at {
                    free.push(slot);
                }
                until >= at
            });
            slots[inputs + at] = take(&mut free);
            busy.push((last[inputs + at], slots[inputs + at]));
        }
        Loop { code: compile(&pass), pass, dtypes, slots, tiles, copied, stored }
    }

    /// Bytes of scratch that [`Loop::run`] needs.
    pub fn scratch_bytes(&self) -> usize {
        if self.code.is_some() { 0 } else { self.tiles as usize * SLOT }
    }

    /// Runs over `len` elements. `addresses` are those of the inputs, then of the outputs.
    ///
    /// # Safety
    /// Each address holds `len` aligned elements of its type; that of a single element one; that of a fold has room for
    /// the accumulators of each chunk; a streamed output is aligned to 64 bytes. An output shares memory with no input
    /// and no other output, except that it may have the very address of an input of the same element size. `scratch` has
    /// [`Loop::scratch_bytes`] bytes, aligned to 8, and nobody else uses any of it.
    pub unsafe fn run(&self, addresses: &[*mut u8], len: usize, scratch: *mut u8) {
        debug_assert_eq!(addresses.len(), self.pass.inputs.len() + self.pass.outputs.len());
        match &self.code {
            // SAFETY: promised by the caller.
            Some(code) => unsafe { code.run(addresses, len) },
            // SAFETY: as above.
            None => unsafe { self.interpret(addresses, len, scratch) },
        }
    }

    /// # Safety
    /// As for [`Loop::run`].
    unsafe fn interpret(&self, addresses: &[*mut u8], len: usize, scratch: *mut u8) {
        let inputs = self.pass.inputs.len();
        let (from, to) = addresses.split_at(inputs);
        let slot = |value: usize| scratch.wrapping_add(self.slots[value] as usize * SLOT);
        for (value, input) in self.pass.inputs.iter().enumerate().filter(|(_, i)| i.splat) {
            // SAFETY: promised by the caller.
            let bytes = unsafe { std::slice::from_raw_parts(from[value], input.dtype.size()) };
            splat(slot(value), bytes, len.min(TILE));
        }
        // A result that takes the place of an operand waits in scratch until the tile is done.
        let direct: SmallVec<[Option<*mut u8>; 32]> = (self.stored.iter())
            .map(|out| out.map(|k| to[k as usize]).filter(|out| !from.contains(out)))
            .collect();
        for at in (0..len).step_by(TILE) {
            let count = TILE.min(len - at);
            let place = |value: usize| match value.checked_sub(inputs) {
                None if self.pass.inputs[value].splat => slot(value),
                None => from[value].wrapping_add(at * self.dtypes[value].size()),
                Some(step) => match direct[step] {
                    Some(out) => out.wrapping_add(at * self.dtypes[value].size()),
                    None => slot(value),
                },
            };
            for (i, step) in self.pass.steps.iter().enumerate() {
                let args: SmallVec<[*const u8; 3]> =
                    step.args.iter().map(|&arg| place(arg as usize).cast_const()).collect();
                // SAFETY: each place holds `count` elements; scratch tiles are given back only after their last use, and
                // what is written directly shares memory with no input.
                unsafe { kernel(&step.call, &args, place(inputs + i), count) };
            }
            // Folds first: a store may end the operand that a fold reads.
            for (k, output) in self.pass.outputs.iter().enumerate() {
                let Output::Fold { value, kind } = *output else { continue };
                let dtype = self.dtypes[value as usize];
                let size = reduction::LANES * reduction::wide(dtype).size();
                let target = to[k].wrapping_add(at / reduction::CHUNK * size);
                // SAFETY: promised by the caller; a tile is a whole number of chunks.
                unsafe { reduction::lanes(kind, dtype, place(value as usize), count, target) };
            }
            let replaced = |value: usize| value < inputs && to.contains(&from[value]);
            for &value in self.copied.iter().filter(|&&value| replaced(value as usize)) {
                let (value, size) = (value as usize, self.dtypes[value as usize].size());
                // SAFETY: both hold `count` elements, and scratch is no operand.
                unsafe { std::ptr::copy_nonoverlapping(place(value), slot(value), count * size) };
            }
            for (k, output) in self.pass.outputs.iter().enumerate() {
                let Output::Store { value, .. } = *output else { continue };
                let (value, size) = (value as usize, self.dtypes[value as usize].size());
                let source = if replaced(value) { slot(value) } else { place(value) };
                let target = to[k].wrapping_add(at * size);
                if source != target {
                    // SAFETY: both hold `count` elements and are two places.
                    unsafe { std::ptr::copy_nonoverlapping(source, target, count * size) };
                }
            }
        }
    }
}
