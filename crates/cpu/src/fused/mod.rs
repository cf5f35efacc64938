//! Fused execution: several nodes as one pass over memory.
//!
//! A fuser (`elementwise.rs`, `rows.rs`, `product.rs`) collects nodes of a window into a program (`program.rs`) in static single
//! assignment. At its first run the program is cut into lines (`schedule.rs`, `line.rs`), each a pass (`pass.rs`) but for
//! what depends on shapes. A run lays its operands over a grid (`layout.rs`), makes room for results (`bind.rs`) and runs
//! the lines over parts of the grid (`run.rs`), by generated code or by the loops of the unfused device (`looped.rs`).
//! Either way the bits are those of the nodes run one by one.

pub(crate) mod kernel;
pub(crate) mod pass;
mod elementwise;
mod product;
mod rows;

mod program;
mod schedule;
mod line;
mod layout;
mod bind;
mod looped;
mod run;
mod scratch;
mod group;

pub(crate) use elementwise::Elementwise;
pub(crate) use product::Product;
pub(crate) use rows::Rows;

use kiln_fuse::{LAUNCH, Window};
use kiln_ir::Id;

/// Bytes that need not be moved when the nodes at `places` run as one; a launch counts as [`LAUNCH`].
fn saved(window: &Window<'_>, places: &[usize]) -> f64 {
    let mut saved = (LAUNCH * places.len().saturating_sub(1)) as f64;
    let mut read: Vec<Id> = Vec::new();
    for node in places.iter().filter_map(|&at| window.node(at)) {
        for &id in &node.ins {
            let made = window.maker(id).is_some_and(|m| places.binary_search(&m).is_ok());
            if made || read.contains(&id) {
                saved += window.meta(id).bytes() as f64;
            } else {
                read.push(id);
            }
        }
        let inner = node.outs.iter().filter(|&&id| !window.leaves(id, places));
        saved += inner.map(|&id| window.meta(id).bytes() as f64).sum::<f64>();
    }
    saved
}
