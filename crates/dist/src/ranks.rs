//! Sums over the processes of a group.

use crate::devices::{Layout as Shapes, cut, flatten};
use crate::shards::Partial;
use kiln_group::{Call, Group, Op, Reduce};
use kiln_tensor::{Bytes, DType, Data, Device, Meta, Tensor};

/// Why ranks could not exchange.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Error {
    #[error(transparent)]
    Group(#[from] kiln_group::Error),
    #[error(transparent)]
    Device(#[from] kiln_tensor::Error),
}

/// The sum over all shards of lists of f32 tensors, from what this rank made of its shards; the same on every rank.
///
/// # Panics
/// If a tensor is not f32, or the partials are not those that the group's layout asks of this rank.
#[track_caller]
pub fn all_reduce_ranks(group: &Group, partials: Vec<Partial<Vec<Tensor>>>) -> Result<Vec<Tensor>, Error> {
    let flat: Vec<(Partial<Tensor>, Shapes)> = partials.into_iter().map(flatten).collect();
    let (first, shapes) = flat.first().expect("a rank holds at least one shard");
    let (device, meta): (Device, Meta) = (first.value.device(), first.value.meta());
    assert_eq!(meta.dtype, DType::F32, "gradients are exchanged in f32");
    let mut buffer = group.buffer(meta.bytes())?;
    assert_eq!(flat.len(), buffer.parts(), "partials of this rank");
    // All are asked for before the first is waited for. A rank that has none to give still takes part.
    let reads: Vec<_> = flat.iter().map(|(partial, _)| partial.value.to_data_async()).collect();
    for (part, read) in reads.into_iter().enumerate() {
        match read.wait() {
            Ok(data) => buffer.part_mut(part).copy_from_slice(&data.bytes),
            Err(error) => buffer.poison(&error.to_string()),
        }
    }
    let sum = group.run(Call::new(Op::AllReduce(Reduce::Sum), DType::F32), buffer)?;
    let whole = Tensor::from_data(Data::new(meta, Bytes::new(sum.to_vec())), &device);
    Ok(cut(&whole, shapes))
}
