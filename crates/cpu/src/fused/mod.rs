//! Fused execution: several nodes as one pass over memory.
//!
//! A fuser collects nodes of a window; its result is a small program in static single assignment that is bound to
//! values and run in tiles. `elementwise.rs` takes nodes of one shape, `rows.rs` nodes around reductions of rows. Every
//! instruction is a loop of the unfused device, so the bits are the same.

pub(crate) mod kernel;
pub(crate) mod pass;
mod source;
mod elementwise;
mod rows;

pub(crate) use elementwise::Elementwise;
pub(crate) use rows::Rows;

use kiln_fuse::{LAUNCH, Window};
use kiln_ir::Id;

/// Bytes that need not be moved when the nodes at `places` run as one; a launch counts as [`LAUNCH`].
fn saved(window: &Window<'_>, places: &[usize]) -> f64 {
    let mut saved = LAUNCH * places.len().saturating_sub(1);
    let mut read: Vec<Id> = Vec::new();
    for node in places.iter().filter_map(|&at| window.node(at)) {
        for &id in &node.ins {
            let made = window.maker(id).is_some_and(|m| places.binary_search(&m).is_ok());
            if made || read.contains(&id) {
                saved += window.meta(id).bytes();
            } else {
                read.push(id);
            }
        }
        let inner = node.outs.iter().filter(|&&id| !window.leaves(id, places));
        saved += inner.map(|&id| window.meta(id).bytes()).sum::<usize>();
    }
    saved as f64
}
