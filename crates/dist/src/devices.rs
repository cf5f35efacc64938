//! Collectives over devices of one program: each device keeps its own copy of the result.

use crate::shards::{Partial, combine};
use kiln_tensor::{Error, Tensor};

/// What reducing gives: for each device, the reduced list of tensors.
type Reduced = Vec<Vec<Tensor>>;

/// The sum over all shards of lists of tensors, on every device that has some. `partials[d]` is what device `d` made of
/// its shards, each a list of the same tensors. Devices exchange what they have directly where they can.
///
/// Each device owns a part of the elements: it gets that part from all others, adds in the order of the tree, and gives
/// the sum to all others. So each sends and receives 2(n-1)/n of a list where each has one partial.
pub fn all_reduce(shards: usize, partials: Vec<Vec<Partial<Vec<Tensor>>>>) -> Result<Reduced, Error> {
    let devices = partials.len();
    let flat = partials.into_iter().map(|list| list.into_iter().map(flatten).collect::<Vec<_>>());
    let flat: Vec<Vec<(Partial<Tensor>, Layout)>> = flat.collect();
    let Some(layout) = flat.iter().flatten().map(|(_, layout)| layout.clone()).next() else {
        return Ok(Vec::new());
    };
    assert!(flat.iter().flatten().all(|(_, l)| *l == layout), "devices reduce other tensors than each other");
    let homes: Vec<_> = flat.iter().map(|list| list.first().map(|(p, _)| p.value.device())).collect();
    let total: usize = layout.iter().map(|shape| shape.iter().product::<usize>()).sum();
    let owners: Vec<usize> = (0..devices).filter(|&d| homes[d].is_some()).collect();
    // Which elements each owner sums.
    let share = |i: usize| (total * i / owners.len())..(total * (i + 1) / owners.len());
    let mut sums: Vec<Tensor> = Vec::new();
    for (i, &owner) in owners.iter().enumerate() {
        let (part, home) = (share(i), homes[owner].clone().unwrap_or_default());
        let mut list = Vec::new();
        for (partial, _) in flat.iter().flatten() {
            let piece = partial.value.narrow(0, part.start as isize, part.len()).to_device(&home)?;
            list.push(Partial { first: partial.first, shards: partial.shards, value: piece });
        }
        list.sort_by_key(|p| p.first);
        let sum = combine(shards, list, |a, b| a + b);
        sums.push(sum.unwrap_or_else(|| panic!("the partials do not cover {shards} shards")));
    }
    let mut reduced = Vec::new();
    for home in &homes {
        let Some(home) = home else {
            reduced.push(Vec::new());
            continue;
        };
        let parts = sums.iter().map(|sum| sum.to_device(home)).collect::<Result<Vec<_>, _>>()?;
        let whole = if parts.len() == 1 {
            parts[0].clone()
        } else {
            Tensor::cat(&parts.iter().collect::<Vec<_>>(), 0)
        };
        reduced.push(cut(&whole, &layout));
    }
    Ok(reduced)
}

/// The shapes of a list of tensors.
pub(crate) type Layout = Vec<Vec<usize>>;

/// The tensors of these shapes that lie one after another in a vector.
pub(crate) fn cut(whole: &Tensor, layout: &Layout) -> Vec<Tensor> {
    let mut at = 0;
    let slice = |shape: &Vec<usize>| {
        let n: usize = shape.iter().product();
        at += n;
        let shape: Vec<isize> = shape.iter().map(|&d| d as isize).collect();
        whole.narrow(0, (at - n) as isize, n).reshape(&shape[..])
    };
    layout.iter().map(slice).collect()
}

/// A list of tensors as one vector.
pub(crate) fn flatten(partial: Partial<Vec<Tensor>>) -> (Partial<Tensor>, Layout) {
    let layout = partial.value.iter().map(|t| t.shape().to_vec()).collect();
    let rows: Vec<Tensor> = partial.value.iter().map(|t| t.reshape([-1])).collect();
    let value =
        if rows.len() == 1 { rows[0].clone() } else { Tensor::cat(&rows.iter().collect::<Vec<_>>(), 0) };
    (Partial { first: partial.first, shards: partial.shards, value }, layout)
}
