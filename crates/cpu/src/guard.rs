//! Whether all elements of a value are finite: what the guard of a step asks of gradients.

use crate::elementwise::with_type;
use crate::tile::{TILE, TileSource, tiles};
use crate::view::View;
use half::{bf16, f16};
use kiln_ir::DType;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether no element is infinite or NaN. Looks no further once one is.
pub(crate) fn all_finite(x: &View) -> bool {
    if !x.dtype.is_float() {
        return true;
    }
    let fine = AtomicBool::new(true);
    with_type!(x.dtype, float T => {
        let source = TileSource::<T>::new(x);
        tiles(x.numel(), &|from, len| {
            if fine.load(Ordering::Relaxed) {
                let mut scratch = [T::default(); TILE];
                // Without a branch, so that it runs in vectors.
                let tile = source.tile(from, &mut scratch[..len]);
                if !tile.iter().fold(true, |fine, x| fine & x.is_finite()) {
                    fine.store(false, Ordering::Relaxed);
                }
            }
        })
    });
    fine.into_inner()
}
