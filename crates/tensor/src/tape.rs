//! The graph of derivatives. It belongs to the values: each tracked tensor links to the step that made it, a step to
//! the links of its operands. There is no global tape. What a step keeps for backward is computed from its rule.

use crate::tensor::emit;
use crate::value::Value;
use crate::{Device, Tensor};
use kiln_device::Origin;
use kiln_ir::{Build, Meta, Op};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Where a tensor's gradient goes.
#[derive(Clone)]
pub(crate) enum Link {
    /// To the user.
    Leaf(Arc<Leaf>),
    /// To result `1` of a step.
    Step(Arc<Step>, u32),
}

/// A tensor whose gradient the user asked for.
pub(crate) struct Leaf {
    pub id: u64,
}

/// A recorded operation on tracked tensors.
pub(crate) struct Step {
    /// Steps are numbered as they are made, so that a step's operands have smaller numbers.
    pub number: u64,
    pub rule: Rule,
    pub links: SmallVec<[Option<Link>; 2]>,
    pub ins: SmallVec<[Meta; 2]>,
    pub outs: SmallVec<[Meta; 1]>,
    pub device: Device,
    pub origin: Origin,
    /// Operands and then results whose values the rule uses; taken by the first backward that does not keep them.
    pub saved: Mutex<Option<Saved>>,
}

/// A step's kept values: `None` where the rule does not use one.
#[derive(Clone, Default)]
pub(crate) struct Saved {
    pub ins: SmallVec<[Option<Arc<Value>>; 2]>,
    pub outs: SmallVec<[Option<Arc<Value>>; 1]>,
}

/// How a step's gradients are made.
pub(crate) enum Rule {
    /// From the operation's rule.
    Op(Op),
    /// By the user's function: gradients of the results to gradients of the operands.
    Custom(CustomRule),
    /// By running the user's function again and differentiating what it records then.
    Again(Again),
}

pub(crate) type CustomRule = Box<dyn Fn(&[Option<Tensor>]) -> Vec<Option<Tensor>> + Send + Sync>;
pub(crate) type Again = Box<dyn Fn() -> Tensor + Send + Sync>;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

/// Whether operations on tracked tensors are kept for backward on this thread.
pub fn is_grad_enabled() -> bool {
    ENABLED.get()
}

/// Runs `f` without keeping anything for backward.
pub fn no_grad<T>(f: impl FnOnce() -> T) -> T {
    with_grad(false, f)
}

pub(crate) fn with_grad<T>(enabled: bool, f: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            ENABLED.set(self.0);
        }
    }
    let _restore = Restore(ENABLED.replace(enabled));
    f()
}

pub(crate) fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Makes the step of an operation that has just been recorded, and its results as tensors.
pub(crate) fn track(
    op: Op,
    ins: &[&Tensor],
    values: SmallVec<[Arc<Value>; 2]>,
    origin: Origin,
) -> SmallVec<[Tensor; 2]> {
    let metas: SmallVec<[Meta; 2]> = ins.iter().map(|t| t.value.meta).collect();
    let outs: SmallVec<[Meta; 1]> = values.iter().map(|v| v.meta).collect();
    let mut links: SmallVec<[Option<Link>; 2]> = SmallVec::with_capacity(ins.len());
    let mut kept = 0;
    for (i, t) in ins.iter().enumerate() {
        let flows = t.link.is_some() && !matches!(kiln_grad::flow(&op, i), kiln_grad::Flow::None(_));
        links.push(if flows { t.link.clone() } else { None });
        if flows {
            kept |= kiln_grad::saves(&op, &metas, &outs, i);
        }
    }
    if links.iter().all(Option::is_none) || !outs.iter().any(|m| m.dtype.is_float()) {
        return values.into_iter().map(|value| Tensor { value, link: None }).collect();
    }
    let saved = Saved {
        ins: ins.iter().enumerate().map(|(i, t)| (kept >> i & 1 == 1).then(|| t.value.clone())).collect(),
        outs: values
            .iter()
            .enumerate()
            .map(|(i, v)| (kept >> (32 + i) & 1 == 1).then(|| v.clone()))
            .collect(),
    };
    let device = values[0].device().clone();
    let step = Arc::new(Step {
        number: number(),
        rule: Rule::Op(op),
        links,
        ins: metas,
        outs,
        device,
        origin,
        saved: Mutex::new(Some(saved)),
    });
    values
        .into_iter()
        .enumerate()
        .map(|(i, value)| {
            let link = value.meta.dtype.is_float().then(|| Link::Step(step.clone(), i as u32));
            Tensor { value, link }
        })
        .collect()
}

thread_local! {
    /// What steps that are being dropped on this thread held; nothing while none is.
    static ENDING: RefCell<Option<Vec<Held>>> = const { RefCell::new(None) };
}

/// What a step holds that may hold other steps: links, and tensors that its rule captured.
type Held = (SmallVec<[Option<Link>; 2]>, Option<Rule>);

/// Dropping a long chain of steps one inside the other would overflow the stack: the first one drops the rest in a loop.
impl Drop for Step {
    fn drop(&mut self) {
        let rule = match self.rule {
            Rule::Op(_) => None,
            Rule::Custom(_) | Rule::Again(_) => Some(std::mem::replace(&mut self.rule, Rule::Op(Op::Select))),
        };
        if rule.is_none() && !self.links.iter().any(|link| matches!(link, Some(Link::Step(..)))) {
            return;
        }
        let mut held = Some((std::mem::take(&mut self.links), rule));
        // Where the thread is ending there is no list, and what is held is dropped here.
        let first = ENDING.try_with(|ending| match &mut *ending.borrow_mut() {
            Some(list) => {
                list.extend(held.take());
                false
            }
            none => none.insert(Vec::new()).is_empty(),
        });
        while let Some(one) = held.take() {
            drop(one);
            held = ENDING.try_with(|ending| ending.borrow_mut().as_mut().and_then(Vec::pop)).ok().flatten();
        }
        if first == Ok(true) {
            let _ = ENDING.try_with(|ending| ending.take());
        }
    }
}

/// A builder whose values are tensors: what rules and lowerings write is recorded.
pub(crate) struct Recorder {
    device: Device,
    origin: Origin,
    tensors: RefCell<Vec<Option<Tensor>>>,
    metas: RefCell<Vec<Meta>>,
    emitted: RefCell<Vec<Emitted>>,
}

/// A node that was recorded, and its results.
struct Emitted {
    op: Op,
    ins: SmallVec<[u32; 3]>,
    outs: SmallVec<[u32; 2]>,
}

impl Recorder {
    pub fn new(device: Device, origin: Origin, given: impl IntoIterator<Item = Tensor>) -> Recorder {
        let recorder = Recorder {
            device,
            origin,
            tensors: RefCell::default(),
            metas: RefCell::default(),
            emitted: RefCell::default(),
        };
        for tensor in given {
            let meta = tensor.meta();
            recorder.push(Some(tensor), meta);
        }
        recorder
    }

    /// Adds a value, or only its meta where the value is not kept.
    pub fn push(&self, tensor: Option<Tensor>, meta: Meta) -> u32 {
        self.tensors.borrow_mut().push(tensor);
        self.metas.borrow_mut().push(meta);
        self.metas.borrow().len() as u32 - 1
    }

    pub fn tensor(&self, key: u32) -> Tensor {
        self.tensors.borrow()[key as usize].clone().expect("a rule used a value that its probe did not")
    }
}

impl Build for Recorder {
    /// The rules of one step's operands often need the same intermediate values: a node is recorded once.
    fn emit(&self, op: Op, ins: &[u32]) -> SmallVec<[u32; 2]> {
        if let Some(same) = self.emitted.borrow().iter().find(|e| e.ins[..] == *ins && e.op == op) {
            return same.outs.clone();
        }
        let operands: SmallVec<[Tensor; 3]> = ins.iter().map(|&key| self.tensor(key)).collect();
        let refs: SmallVec<[&Tensor; 3]> = operands.iter().collect();
        let outs: SmallVec<[u32; 2]> = emit(op.clone(), &refs, &self.device, self.origin)
            .into_iter()
            .map(|tensor| {
                let meta = tensor.meta();
                self.push(Some(tensor), meta)
            })
            .collect();
        self.emitted.borrow_mut().push(Emitted { op, ins: SmallVec::from_slice(ins), outs: outs.clone() });
        outs
    }

    fn meta(&self, value: u32) -> Meta {
        self.metas.borrow()[value as usize]
    }
}
