//! The graph of derivatives. It belongs to the values: each tracked tensor links to the step that made it, a step to
//! the links of its operands. There is no global tape. What a step keeps for backward is computed from its rule.

use crate::tensor::emit;
use crate::value::Value;
use crate::{Device, Tensor};
use kiln_device::Origin;
use kiln_ir::{Build, Meta, Op};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Where a tensor's gradient goes.
#[derive(Clone)]
pub(crate) enum Edge {
    /// To the user.
    Leaf(Arc<Leaf>),
    /// To result `1` of a step.
    Step(Arc<GradStep>, u32),
}

/// A tensor whose gradient the user asked for.
pub(crate) struct Leaf {
    pub id: u64,
}

/// A recorded operation on tracked tensors.
pub(crate) struct GradStep {
    /// A step's number is above those of its operands, and of what its thread made before.
    pub number: Number,
    pub rule: GradRule,
    pub edges: SmallVec<[Option<Edge>; 2]>,
    pub metas: Metas,
    pub device: &'static Device,
    pub origin: Origin,
    /// What the rule uses; taken by the first backward that does not keep it.
    pub saved: Mutex<Option<SavedValues>>,
}

/// Names a step, and orders it after its operands.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Number {
    clock: u64,
    thread: u32,
}

/// The metas of a step's operands and results.
pub(crate) enum Metas {
    /// One result, and operands that all are like it.
    Same(Meta),
    /// Operands and then results; how many operands there are.
    Each(Box<[Meta]>, usize),
}

impl Metas {
    pub fn new(ins: &[&Tensor], outs: &[Arc<Value>]) -> Metas {
        let first = outs[0].meta;
        if outs.len() == 1 && ins.iter().all(|t| t.value.meta == first) {
            return Metas::Same(first);
        }
        let outs = outs.iter().map(|v| v.meta);
        Metas::Each(ins.iter().map(|t| t.value.meta).chain(outs).collect(), ins.len())
    }

    /// How many results there are.
    pub fn outs(&self) -> usize {
        match self {
            Metas::Same(_) => 1,
            Metas::Each(all, ins) => all.len() - ins,
        }
    }

    pub fn operand(&self, i: usize) -> Meta {
        match self {
            Metas::Same(meta) => *meta,
            Metas::Each(all, _) => all[i],
        }
    }

    pub fn result(&self, i: usize) -> Meta {
        match self {
            Metas::Same(meta) => *meta,
            Metas::Each(all, ins) => all[ins + i],
        }
    }
}

/// A step's kept values: operands and then results, each with its place among them.
pub(crate) type SavedValues = SmallVec<[(u32, Arc<Value>); 2]>;

/// How a step's gradients are made.
pub(crate) enum GradRule {
    /// From the operation's rule.
    Op(Op),
    /// By the user's function: gradients of the results to gradients of the operands.
    Custom(CustomRule),
    /// By running the user's function again and differentiating what it records then.
    Recompute(Recompute),
}

pub(crate) type CustomRule = Box<dyn Fn(&[Option<Tensor>]) -> Vec<Option<Tensor>> + Send + Sync>;
pub(crate) type Recompute = Box<dyn Fn() -> Tensor + Send + Sync>;

thread_local! {
    static ENABLED: Cell<bool> = const { Cell::new(true) };
}

/// Whether operations on tracked tensors are kept for backward on this thread.
pub fn is_grad_enabled() -> bool {
    ENABLED.get()
}

/// Runs `f` without keeping anything for backward.
#[doc(alias("inference_mode"))]
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

/// A number for a leaf, its own in the process.
pub(crate) fn leaf_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A number above those of the steps behind `links`. It is no other step's: a thread's numbers ascend.
pub(crate) fn number(edges: &[Option<Edge>]) -> Number {
    thread_local! {
        static LAST: Cell<Number> = const { Cell::new(Number { clock: 0, thread: 0 }) };
    }
    static THREADS: AtomicU32 = AtomicU32::new(1);
    let mut last = LAST.get();
    if last.thread == 0 {
        last.thread = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    for edge in edges.iter().flatten() {
        if let Edge::Step(step, _) = edge {
            last.clock = last.clock.max(step.number.clock);
        }
    }
    last.clock += 1;
    LAST.set(last);
    last
}

/// Makes the step of an operation that has just been recorded, and its results as tensors.
pub(crate) fn track(
    op: Op,
    ins: &[&Tensor],
    values: SmallVec<[Arc<Value>; 2]>,
    origin: Origin,
) -> SmallVec<[Tensor; 2]> {
    let Some(step) = step(op, ins, &values, origin) else {
        return values.into_iter().map(|value| Tensor { value, edge: None }).collect();
    };
    values
        .into_iter()
        .enumerate()
        .map(|(i, value)| {
            let edge = value.meta.dtype.is_float().then(|| Edge::Step(step.clone(), i as u32));
            Tensor { value, edge }
        })
        .collect()
}

/// Like [`track`], for an operation with one result.
pub(crate) fn track_one(op: Op, ins: &[&Tensor], value: Arc<Value>, origin: Origin) -> Tensor {
    let edge = step(op, ins, std::slice::from_ref(&value), origin).map(|step| Edge::Step(step, 0));
    Tensor { value, edge }
}

/// The step of an operation; `None` if no gradient flows through it.
fn step(op: Op, ins: &[&Tensor], values: &[Arc<Value>], origin: Origin) -> Option<Arc<GradStep>> {
    if !values.iter().any(|v| v.meta.dtype.is_float()) {
        return None;
    }
    let mut edges: SmallVec<[Option<Edge>; 2]> = SmallVec::with_capacity(ins.len());
    let mut kept = 0;
    let mut any = false;
    for (i, t) in ins.iter().enumerate() {
        let flows = t.edge.is_some() && !matches!(kiln_grad::flow(&op, i), kiln_grad::Flow::None(_));
        edges.push(if flows { t.edge.clone() } else { None });
        if flows {
            any = true;
            kept |= saves(&op, ins, values, i);
        }
    }
    if !any {
        return None;
    }
    let mut saved = SavedValues::new();
    if kept != 0 {
        let all = ins.iter().map(|t| &t.value).chain(values);
        let bit = |i: usize| if i < ins.len() { i } else { 32 + i - ins.len() };
        saved.extend(
            all.enumerate()
                .filter(|&(i, _)| kept == u64::MAX || bit(i) < 64 && kept >> bit(i) & 1 == 1)
                .map(|(i, v)| (i as u32, v.clone())),
        );
    }
    Some(Arc::new(GradStep {
        number: number(&edges),
        rule: GradRule::Op(op),
        edges,
        metas: Metas::new(ins, values),
        device: values[0].device(),
        origin,
        saved: Mutex::new(Some(saved)),
    }))
}

/// What the rule for operand `i` uses. A training step asks the same again and again, so each thread remembers.
fn saves(op: &Op, ins: &[&Tensor], values: &[Arc<Value>], i: usize) -> u64 {
    /// An operation on these metas (operands and then results), an operand, and what its rule uses.
    type Memo = (Op, SmallVec<[Meta; 4]>, usize, u64);
    thread_local! {
        static KNOWN: RefCell<Vec<Memo>> = const { RefCell::new(Vec::new()) };
    }
    const MOST: usize = 64;
    // What elementwise rules use does not depend on metas.
    if matches!(op, Op::Unary(_) | Op::Binary(_)) {
        return kiln_grad::saves(op, &[], &[], i);
    }
    let metas = || ins.iter().map(|t| t.value.meta).chain(values.iter().map(|v| v.meta));
    let count = ins.len() + values.len();
    let find = |known: &Vec<Memo>| {
        let same =
            |k: &&Memo| k.2 == i && k.0 == *op && k.1.len() == count && k.1.iter().copied().eq(metas());
        known.iter().find(same).map(|k| k.3)
    };
    if let Ok(Some(bits)) = KNOWN.try_with(|known| find(&known.borrow())) {
        return bits;
    }
    let all: SmallVec<[Meta; 4]> = metas().collect();
    let bits = kiln_grad::saves(op, &all[..ins.len()], &all[ins.len()..], i);
    let _ = KNOWN.try_with(|known| {
        let mut known = known.borrow_mut();
        if known.len() == MOST {
            known.clear();
        }
        known.push((op.clone(), all, i, bits));
    });
    bits
}

thread_local! {
    /// What steps that are being dropped on this thread held; `None` while none is.
    static ENDING: RefCell<Option<Vec<Holding>>> = const { RefCell::new(None) };
}

/// What a step holds that may hold other steps: links, and tensors that its rule captured.
enum Holding {
    Edges(SmallVec<[Option<Edge>; 2]>),
    Custom(#[allow(dead_code)] CustomRule),
    Recompute(#[allow(dead_code)] Recompute),
}

impl GradStep {
    /// Takes out what it holds that may hold other steps.
    fn held(&mut self, mut take: impl FnMut(Holding)) {
        if self.edges.iter().any(|edge| matches!(edge, Some(Edge::Step(..)))) {
            take(Holding::Edges(std::mem::take(&mut self.edges)));
        }
        if !matches!(self.rule, GradRule::Op(_)) {
            match std::mem::replace(&mut self.rule, GradRule::Op(Op::Select)) {
                GradRule::Op(_) => {}
                GradRule::Custom(rule) => take(Holding::Custom(rule)),
                GradRule::Recompute(rule) => take(Holding::Recompute(rule)),
            }
        }
    }
}

/// Dropping a long chain of steps one inside the other would overflow the stack: the first one drops the rest in a loop.
impl Drop for GradStep {
    fn drop(&mut self) {
        let mut stack: SmallVec<[Holding; 4]> = SmallVec::new();
        self.held(|held| stack.push(held));
        if stack.is_empty() {
            return;
        }
        // Inside another step's drop, that one's loop goes on with it. Where the thread is ending there is no list.
        let first = ENDING.try_with(|ending| match &mut *ending.borrow_mut() {
            Some(list) => {
                list.extend(stack.drain(..));
                false
            }
            none => none.insert(Vec::new()).is_empty(),
        });
        while let Some(held) = stack.pop() {
            match held {
                Holding::Edges(edges) => {
                    for edge in edges.into_iter().flatten() {
                        let Edge::Step(mut step, _) = edge else { continue };
                        // The last holder empties it, so that its own drop has nothing to do.
                        if let Some(step) = Arc::get_mut(&mut step) {
                            step.held(|held| stack.push(held));
                        }
                    }
                }
                captured @ (Holding::Custom(_) | Holding::Recompute(_)) => drop(captured),
            }
            if stack.is_empty() {
                let next = ENDING.try_with(|ending| ending.borrow_mut().as_mut().and_then(Vec::pop));
                stack.extend(next.ok().flatten());
            }
        }
        if first == Ok(true) {
            let _ = ENDING.try_with(|ending| ending.take());
        }
    }
}

/// A builder whose values are tensors: what rules and lowerings write is recorded.
pub(crate) struct Recorder {
    device: &'static Device,
    origin: Origin,
    tensors: RefCell<Vec<Option<Tensor>>>,
    metas: RefCell<Vec<Meta>>,
    emitted: RefCell<Vec<RecordedNode>>,
}

/// A node that was recorded, and its results.
struct RecordedNode {
    op: Op,
    ins: SmallVec<[u32; 3]>,
    outs: SmallVec<[u32; 2]>,
}

impl Recorder {
    pub fn new(device: &'static Device, origin: Origin, given: impl IntoIterator<Item = Tensor>) -> Recorder {
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

    /// Forgets everything but keeps its memory, and records for another line from now on.
    pub fn reset(&mut self, device: &'static Device, origin: Origin) {
        (self.device, self.origin) = (device, origin);
        self.tensors.get_mut().clear();
        self.metas.get_mut().clear();
        self.emitted.get_mut().clear();
    }

    /// Adds a value, or only its meta where the value is not kept.
    pub fn push(&self, tensor: Option<Tensor>, meta: Meta) -> u32 {
        self.tensors.borrow_mut().push(tensor);
        let mut metas = self.metas.borrow_mut();
        metas.push(meta);
        metas.len() as u32 - 1
    }

    pub fn tensor(&self, key: u32) -> Tensor {
        self.tensors.borrow()[key as usize].clone().expect("a rule used a value that its probe did not")
    }

    /// The same, not held here any more if a node gave it: a rule that needs it again records that node again.
    pub fn take(&self, key: u32) -> Tensor {
        let mut emitted = self.emitted.borrow_mut();
        match emitted.iter().position(|e| e.outs.contains(&key)) {
            Some(at) => {
                emitted.swap_remove(at);
                self.tensors.borrow_mut()[key as usize]
                    .take()
                    .expect("a node's result is held until it is taken")
            }
            None => self.tensor(key),
        }
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
        let outs: SmallVec<[u32; 2]> = emit(op.clone(), &refs, self.device, self.origin)
            .into_iter()
            .map(|tensor| {
                let meta = tensor.meta();
                self.push(Some(tensor), meta)
            })
            .collect();
        self.emitted.borrow_mut().push(RecordedNode {
            op,
            ins: SmallVec::from_slice(ins),
            outs: outs.clone(),
        });
        outs
    }

    fn meta(&self, value: u32) -> Meta {
        self.metas.borrow()[value as usize]
    }
}
