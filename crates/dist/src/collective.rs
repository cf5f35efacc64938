//! Collectives on tensors, between the ranks of a group.
//!
//! A call takes its place in the group's order at once; the exchange starts when the device has computed the
//! contribution, while the caller goes on. The result is behind a [`Handle`], which only `wait` opens. Sums, means,
//! gathering, scattering and broadcast are differentiable: their derivatives are collectives too, so every rank must
//! differentiate. Reductions follow the group's one tree; each rank stands for one shard.

use crate::Error;
use crate::sync::{Lent, Piece, fill};
use kiln_group::{Call, Group, Op, Pending, Reduce, Tag};
use kiln_ir::custom::{CustomOp, register};
use kiln_ir::{CustomCall, OpError};
use kiln_tensor::{Bytes, Data, Device, Meta, Tensor, custom_grad};
use smallvec::SmallVec;
use std::sync::{Arc, Once};

/// Collectives as methods of tensors. Every rank of the group calls with the same dtype and shape.
///
/// ```
/// use kiln_dist::{Collective, Config, Group, Reduce};
/// use kiln_tensor::{Device, Tensor};
///
/// let groups = Group::local(2, Config::default()).unwrap();
/// let rank = |group: &Group| {
///     let x = Tensor::full([2], 1.0 + group.rank() as f64, kiln_tensor::DType::F32, &Device::cpu());
///     let sum = x.all_reduce(group, Reduce::Sum).unwrap();
///     // Something else is computed here, then the result is taken.
///     sum.wait().unwrap().to_vec::<f32>().unwrap()
/// };
/// std::thread::scope(|s| {
///     let other = s.spawn(|| rank(&groups[1]));
///     assert_eq!(rank(&groups[0]), [3.0, 3.0]);
///     assert_eq!(other.join().unwrap(), [3.0, 3.0]);
/// });
/// ```
pub trait Collective {
    /// Every rank gets the combination of all ranks' tensors. Sums and means are differentiable.
    #[track_caller]
    fn all_reduce(&self, group: &Group, reduce: Reduce) -> Result<Handle, Error>;

    /// Every rank gets all ranks' tensors, one after another along the first axis.
    #[track_caller]
    fn all_gather(&self, group: &Group) -> Result<Handle, Error>;

    /// Every rank gets its part, along the first axis, of the combination of all ranks' tensors.
    ///
    /// # Panics
    /// If the first axis cannot be cut into one part a rank.
    #[track_caller]
    fn reduce_scatter(&self, group: &Group, reduce: Reduce) -> Result<Handle, Error>;

    /// Every rank gets the tensor of `root`.
    #[track_caller]
    fn broadcast(&self, group: &Group, root: usize) -> Result<Handle, Error>;
}

/// A collective under way. Its value exists only after [`Handle::wait`].
///
/// ```compile_fail
/// # fn f(x: kiln_tensor::Tensor, group: &kiln_dist::Group) -> Result<(), kiln_dist::Error> {
/// use kiln_dist::{Collective, Reduce};
/// let sum = x.all_reduce(group, Reduce::Sum)?;
/// let early = sum + 1.0; // not a tensor yet
/// # Ok(()) }
/// ```
#[must_use = "the result is there only after wait"]
pub struct Handle {
    pending: Pending,
    group: Group,
    op: Op,
    /// What was given.
    own: Tensor,
    /// What comes back.
    meta: Meta,
}

impl Collective for Tensor {
    #[track_caller]
    fn all_reduce(&self, group: &Group, reduce: Reduce) -> Result<Handle, Error> {
        start(self, group, Op::AllReduce(reduce), self.meta(), Some(0))
    }

    #[track_caller]
    fn all_gather(&self, group: &Group) -> Result<Handle, Error> {
        assert!(self.rank() > 0, "all_gather: a scalar has no axis to lie along");
        let meta = stretched(self.meta(), |n| n * group.ranks());
        start(self, group, Op::AllGather, meta, Some(group.rank() * self.meta().bytes()))
    }

    #[track_caller]
    fn reduce_scatter(&self, group: &Group, reduce: Reduce) -> Result<Handle, Error> {
        let ranks = group.ranks();
        let fits = self.rank() > 0 && self.dim(0).is_multiple_of(ranks);
        assert!(fits, "reduce_scatter: {} cannot be cut into {ranks} parts", self.meta());
        start(self, group, Op::ReduceScatter(reduce), self.meta(), Some(0))
    }

    #[track_caller]
    fn broadcast(&self, group: &Group, root: usize) -> Result<Handle, Error> {
        let from = (group.rank() == root).then_some(0);
        start(self, group, Op::Broadcast(root as u32), self.meta(), from)
    }
}

/// `meta` is that of the whole buffer; the own contribution goes to byte `at` of it, if anywhere.
#[track_caller]
fn start(own: &Tensor, group: &Group, op: Op, meta: Meta, at: Option<usize>) -> Result<Handle, Error> {
    let layout = group.layout();
    if layout.shards() != layout.ranks() {
        return Err(Error::Shared { shards: layout.shards(), ranks: layout.ranks() });
    }
    let tag = Tag::default().add(own.meta().to_string()).finish();
    let call = Call::new(op, meta.dtype).tagged(tag);
    let (promise, pending) = group.promise(call, meta.bytes())?;
    let pieces: Vec<Piece> = at.map(|at| (own.detach(), 0, at)).into_iter().collect();
    fill(promise, pieces, &Arc::default());
    Ok(Handle { pending, group: group.clone(), op, own: own.clone(), meta })
}

/// The same with another first extent.
fn stretched(meta: Meta, f: impl Fn(usize) -> usize) -> Meta {
    let mut shape = meta.shape.to_vec();
    shape[0] = f(shape[0]);
    Meta::new(meta.dtype, &shape[..])
}

impl Handle {
    /// The result, by the group's deadline.
    pub fn wait(self) -> Result<Tensor, Error> {
        let Handle { pending, group, op, own, meta } = self;
        let buffer = pending.wait()?;
        let whole = Tensor::from_data(Data::new(meta, Bytes::new(Lent(buffer))), &own.device());
        let value = match op {
            Op::ReduceScatter(_) => {
                let part = meta.shape[0] / group.ranks();
                whole.narrow(0, (group.rank() * part) as isize, part)
            }
            Op::AllReduce(_) | Op::AllGather | Op::Broadcast(_) | Op::Barrier => whole,
        };
        Ok(derived(&group, op, own, value))
    }
}

/// The result with its derivative: again a collective, which every rank takes part in.
fn derived(group: &Group, op: Op, own: Tensor, value: Tensor) -> Tensor {
    let group = group.clone();
    let (device, meta) = (own.device(), own.meta());
    let back = move |g: &Tensor| -> Result<Option<Tensor>, Error> {
        match op {
            Op::AllReduce(reduce) => g.all_reduce(&group, reduce)?.wait().map(Some),
            Op::AllGather => g.reduce_scatter(&group, Reduce::Sum)?.wait().map(Some),
            Op::ReduceScatter(reduce) => {
                let whole = g.all_gather(&group)?.wait()?;
                let mean = reduce == Reduce::Mean;
                Ok(Some(if mean { whole / group.ranks() as f64 } else { whole }))
            }
            Op::Broadcast(root) => {
                let sum = g.all_reduce(&group, Reduce::Sum)?.wait()?;
                Ok((group.rank() == root as usize).then_some(sum))
            }
            Op::Barrier => Ok(None),
        }
    };
    match op {
        Op::AllReduce(Reduce::Max | Reduce::Min | Reduce::Prod)
        | Op::ReduceScatter(Reduce::Max | Reduce::Min | Reduce::Prod)
        | Op::Barrier => value,
        Op::AllReduce(_) | Op::ReduceScatter(_) | Op::AllGather | Op::Broadcast(_) => {
            custom_grad(&[&own], value, move |g| {
                vec![back(g).unwrap_or_else(|error| Some(failed(meta, &device, &error)))]
            })
        }
    }
}

/// A value that could not be had: reading it gives the error.
fn failed(meta: Meta, device: &Device, error: &Error) -> Tensor {
    static KNOWN: Once = Once::new();
    KNOWN.call_once(|| drop(register(Failed)));
    let call = CustomCall { name: Failed.name().into(), attrs: error.to_string().into_bytes() };
    let like = Tensor::full(meta.shape, 0.0, meta.dtype, device);
    Tensor::apply(kiln_ir::Op::Custom(Arc::new(call)), &[&like]).swap_remove(0)
}

/// Fails with its attributes as the reason.
struct Failed;

impl CustomOp for Failed {
    fn name(&self) -> &str {
        "kiln.failed"
    }

    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        Ok(ins.iter().take(1).copied().collect::<SmallVec<[Meta; 2]>>())
    }

    fn eval(&self, attrs: &[u8], _: &[(Meta, &[u8])], _: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        Err(String::from_utf8_lossy(attrs).into_owned())
    }
}
