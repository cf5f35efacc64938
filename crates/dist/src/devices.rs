//! Collectives over devices of one program: each device keeps its own copy of the result. Servers move the bytes among
//! themselves. Everything is recorded and nothing waits where the devices have a way of their own; all of it is
//! differentiable, being made of moves, cuts and additions.

use crate::shards::{Partial, combine};
use kiln_group::Reduce;
use kiln_tensor::{DType, Device, Error, Tensor};

/// What reducing gives: for each device, the reduced list of tensors.
type Reduced = Vec<Vec<Tensor>>;

/// The sum over all shards of lists of tensors, on every device that has some. `partials[d]` is what device `d` made of
/// its shards, each a list of the same tensors. Devices exchange what they have directly where they can.
///
/// Each device owns a part of the elements: it gets that part from all others, adds in the order of the tree, and gives
/// the sum to all others. So each sends and receives 2(n-1)/n of a list where each has one partial.
pub fn all_reduce(shards: usize, partials: Vec<Vec<Partial<Vec<Tensor>>>>) -> Result<Reduced, Error> {
    exchange(shards, partials, |a, b| a + b)
}

/// Like [`all_reduce`], with any way to combine two.
fn exchange(
    shards: usize,
    partials: Vec<Vec<Partial<Vec<Tensor>>>>,
    join: impl Fn(Tensor, Tensor) -> Tensor,
) -> Result<Reduced, Error> {
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
        let sum = combine(shards, list, &join);
        sums.push(sum.unwrap_or_else(|| panic!("the partials do not cover {shards} shards")));
    }
    let mut reduced = Vec::new();
    for home in &homes {
        let Some(home) = home else {
            reduced.push(Vec::new());
            continue;
        };
        let parts = sums.iter().map(|sum| sum.to_device(home)).collect::<Result<Vec<_>, _>>()?;
        reduced.push(cut(&joined(&parts), &layout));
    }
    Ok(reduced)
}

/// The combination of one tensor of each device, on every one of them.
pub fn all_reduce_devices(tensors: &[Tensor], reduce: Reduce) -> Result<Vec<Tensor>, Error> {
    let Some(dtype) = tensors.first().map(Tensor::dtype) else { return Ok(Vec::new()) };
    if let Err(e) = reduce.fits(dtype) {
        panic!("all_reduce: {e}");
    }
    // Of bools, larger and both are what they are of numbers.
    let as_numbers = |t: &Tensor| if dtype == DType::Bool { t.to_dtype(DType::U8) } else { t.clone() };
    let partial = |(i, t): (usize, &Tensor)| Partial { first: i, shards: 1, value: vec![as_numbers(t)] };
    let partials = tensors.iter().enumerate().map(|t| vec![partial(t)]).collect();
    let join = |a: Tensor, b: Tensor| match reduce {
        Reduce::Sum | Reduce::Mean => a + b,
        Reduce::Max => a.maximum(&b),
        Reduce::Min => a.minimum(&b),
        Reduce::Prod => a * b,
    };
    let reduced = exchange(tensors.len(), partials, join)?;
    let finish = |mut list: Vec<Tensor>| {
        let t = list.swap_remove(0);
        match reduce {
            Reduce::Mean => t / tensors.len() as f64,
            Reduce::Sum | Reduce::Max | Reduce::Min | Reduce::Prod => t.to_dtype(dtype),
        }
    };
    Ok(reduced.into_iter().map(finish).collect())
}

/// The tensors of all devices one after another along the first axis, on every one of them.
pub fn all_gather_devices(tensors: &[Tensor]) -> Result<Vec<Tensor>, Error> {
    let on = |home: Device| Ok(joined(&moved(tensors, &home)?));
    tensors.iter().map(|t| on(t.device())).collect()
}

/// Of the combination of one tensor of each device, the part along the first axis that belongs to each.
///
/// # Panics
/// If the first axis cannot be cut into one part a device.
#[track_caller]
pub fn reduce_scatter_devices(tensors: &[Tensor], reduce: Reduce) -> Result<Vec<Tensor>, Error> {
    let n = tensors.len();
    let mut out = Vec::new();
    for (i, t) in tensors.iter().enumerate() {
        assert!(t.rank() > 0 && t.dim(0).is_multiple_of(n), "reduce_scatter: {} into {n} parts", t.meta());
        let (part, home) = (t.dim(0) / n, t.device());
        let pieces: Vec<Tensor> = tensors.iter().map(|t| t.narrow(0, (i * part) as isize, part)).collect();
        out.push(all_reduce_devices(&moved(&pieces, &home)?, reduce)?.swap_remove(0));
    }
    Ok(out)
}

/// A tensor on each of these devices.
pub fn broadcast_devices(tensor: &Tensor, devices: &[Device]) -> Result<Vec<Tensor>, Error> {
    devices.iter().map(|device| tensor.to_device(device)).collect()
}

fn moved(tensors: &[Tensor], home: &Device) -> Result<Vec<Tensor>, Error> {
    tensors.iter().map(|t| t.to_device(home)).collect()
}

/// The shapes of a list of tensors.
type Layout = Vec<Vec<usize>>;

/// The tensors of these shapes that lie one after another in a vector.
fn cut(whole: &Tensor, layout: &Layout) -> Vec<Tensor> {
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
fn flatten(partial: Partial<Vec<Tensor>>) -> (Partial<Tensor>, Layout) {
    let layout = partial.value.iter().map(|t| t.shape().to_vec()).collect();
    let rows: Vec<Tensor> = partial.value.iter().map(|t| t.reshape([-1])).collect();
    (Partial { first: partial.first, shards: partial.shards, value: joined(&rows) }, layout)
}

fn joined(parts: &[Tensor]) -> Tensor {
    match parts {
        [one] => one.clone(),
        many => Tensor::cat(many, 0),
    }
}
