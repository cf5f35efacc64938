//! The walk backwards: from a result to every leaf, latest step first.
//!
//! Rules record ordinary nodes. A step is visited once, after every step that uses its results, because steps are
//! numbered as they are made. A leaf is handed to the hook as soon as its last contribution is recorded, before the
//! walk goes on, so that its consumer can start work meanwhile.

use crate::tape::{self, Edge, GradRule, GradStep, Leaf, Number, Recorder, SavedValues};
use crate::tensor::emit_one;
use crate::{Device, Tensor};
use kiln_device::Origin;
use kiln_ir::{Binary, Meta, Move, Op, Scalar, V};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

/// # Derivatives
impl Tensor {
    /// A tensor of the same value whose gradient `backward` will give.
    ///
    /// # Panics
    /// If its dtype is not a float.
    #[doc(alias("requires_grad_"))]
    #[track_caller]
    pub fn requires_grad(self) -> Tensor {
        assert!(self.dtype().is_float(), "requires_grad: only floats have gradients, not {}", self.dtype());
        let leaf = Arc::new(Leaf { id: tape::leaf_number() });
        Tensor { value: self.value, edge: Some(Edge::Leaf(leaf)) }
    }

    /// Whether it takes part in differentiation.
    pub fn is_tracked(&self) -> bool {
        self.edge.is_some()
    }

    /// Whether its gradient was asked for by [`Tensor::requires_grad`].
    pub fn is_leaf(&self) -> bool {
        matches!(self.edge, Some(Edge::Leaf(_)))
    }

    /// The same value, outside differentiation.
    pub fn detach(&self) -> Tensor {
        Tensor { value: self.value.clone(), edge: None }
    }

    /// The gradients of this one-element tensor with respect to every leaf it depends on. Saved values are released
    /// on the way; see [`Tensor::differentiate`] to keep them.
    ///
    /// # Panics
    /// If it is not tracked, has more than one element, or was differentiated before.
    #[track_caller]
    pub fn backward(&self) -> Gradients {
        self.differentiate().run()
    }

    /// Like [`Tensor::backward`], from a given gradient of this tensor.
    #[track_caller]
    pub fn backward_with(&self, gradient: &Tensor) -> Gradients {
        self.differentiate().with_gradient(gradient).run()
    }

    /// A backward with options.
    pub fn differentiate(&self) -> Backward<'_> {
        Backward { root: self, seed: None, keep: false, track: false, hook: None, wanted: Vec::new() }
    }

    /// The number of this leaf, which no other leaf of this process has; `None` if it is not a leaf.
    pub fn leaf(&self) -> Option<u64> {
        match &self.edge {
            Some(Edge::Leaf(leaf)) => Some(leaf.id),
            _ => None,
        }
    }
}

/// The gradients of `y` with respect to `xs`, tracked themselves so that they can be differentiated again. `xs` may be
/// any tracked tensors; one that `y` does not depend on gets zeros.
///
/// # Panics
/// If one of them is not tracked, or as [`Tensor::backward`] does.
#[track_caller]
pub fn grad(y: &Tensor, xs: &[&Tensor]) -> Vec<Tensor> {
    // Not in a closure, which would panic at its own line instead of the caller's.
    for (i, x) in xs.iter().enumerate() {
        if !x.is_tracked() {
            panic!(
                "grad: tensor {i} of those to differentiate by, {}, is not tracked: call requires_grad on it before \
                 it is used",
                x.meta()
            );
        }
    }
    let gradients = y.differentiate().create_graph().with_respect_to(xs).run();
    xs.iter().map(|x| gradients.get(x).cloned().unwrap_or_else(|| x.detach().zeros_like())).collect()
}

/// Gradients by leaf. In the order in which leaves were made: they are dropped so, and a recurring step looks the same
/// every time, whatever numbers its leaves have.
#[derive(Default)]
pub struct Gradients {
    leaves: BTreeMap<u64, Tensor>,
    steps: BTreeMap<(Number, u32), Tensor>,
    words: Vec<Tensor>,
}

impl Gradients {
    /// The gradient of a leaf, if the differentiated tensor depends on it.
    pub fn get(&self, of: &Tensor) -> Option<&Tensor> {
        match of.edge.as_ref()? {
            Edge::Leaf(leaf) => self.leaves.get(&leaf.id),
            Edge::Step(step, out) => self.steps.get(&(step.number, *out)),
        }
    }

    /// Takes the gradient of a leaf.
    pub fn remove(&mut self, of: &Tensor) -> Option<Tensor> {
        self.leaves.remove(&of.leaf()?)
    }

    /// Puts a gradient in the place of a leaf's, for hooks and clipping.
    pub fn set(&mut self, of: &Tensor, gradient: Tensor) {
        if let Some(id) = of.leaf() {
            self.leaves.insert(id, gradient);
        }
    }

    /// Adds the gradients of another backward.
    #[track_caller]
    pub fn add(&mut self, other: Gradients) {
        let origin = Origin::here();
        self.words.extend(other.words);
        for (leaf, gradient) in other.leaves {
            let sum = match self.leaves.remove(&leaf) {
                Some(sum) => add(&sum, &gradient, origin),
                None => gradient,
            };
            self.leaves.insert(leaf, sum);
        }
    }

    /// Has a step along these gradients depend on a single bool too, such as what other workers think of it.
    pub fn require(&mut self, word: Tensor) {
        self.words.push(word);
    }

    /// What a step along these gradients depends on besides them.
    pub fn words(&self) -> &[Tensor] {
        &self.words
    }

    /// How many leaves have a gradient.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Whether no leaf has a gradient.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }
}

/// A backward that is being prepared.
pub struct Backward<'a> {
    root: &'a Tensor,
    seed: Option<Tensor>,
    keep: bool,
    track: bool,
    hook: Option<Hook<'a>>,
    wanted: Vec<&'a Tensor>,
}

type Hook<'a> = Box<dyn FnMut(LeafGradient) -> Option<Tensor> + 'a>;

/// A leaf whose gradient is final.
pub struct LeafGradient {
    id: u64,
    /// The gradient.
    pub gradient: Tensor,
}

impl LeafGradient {
    /// The number of the leaf, see [`Tensor::leaf`].
    pub fn leaf(&self) -> u64 {
        self.id
    }

    /// Whether it is the gradient of this leaf.
    pub fn is_of(&self, leaf: &Tensor) -> bool {
        leaf.leaf() == Some(self.id)
    }
}

impl<'a> Backward<'a> {
    /// Starts from this gradient of the tensor instead of 1.
    pub fn with_gradient(mut self, gradient: &Tensor) -> Self {
        self.seed = Some(gradient.clone());
        self
    }

    /// Keeps saved values, so that the tensor can be differentiated again.
    #[doc(alias("persistent"))]
    pub fn retain_graph(mut self) -> Self {
        self.keep = true;
        self
    }

    /// Makes gradients that can themselves be differentiated. Keeps saved values too.
    pub fn create_graph(mut self) -> Self {
        self.track = true;
        self.retain_graph()
    }

    /// Gives the gradients of these tensors too, which need not be leaves: [`Gradients::get`] has them.
    #[doc(alias("retain_grad", "grad_outputs"))]
    pub fn with_respect_to(mut self, xs: &[&'a Tensor]) -> Self {
        self.wanted = xs.to_vec();
        self
    }

    /// Gives each leaf's gradient to `hook` when it is final, before the walk goes on. What the hook returns is among
    /// the results in its place; a gradient that is not, and that the hook lets go, takes no memory any more.
    pub fn on_ready(mut self, hook: impl FnMut(LeafGradient) -> Option<Tensor> + 'a) -> Self {
        self.hook = Some(Box::new(hook));
        self
    }

    /// Walks.
    #[track_caller]
    pub fn run(self) -> Gradients {
        let Some(edge) = &self.root.edge else {
            let name = if self.wanted.is_empty() { "backward" } else { "grad" };
            panic!(
                "{name}: this tensor is not tracked: nothing it was made of requires a gradient, or it was made \
                 under no_grad"
            )
        };
        let root = self.root.meta();
        let seed = match &self.seed {
            Some(seed) => {
                assert!(seed.meta() == root, "backward: the gradient is {}, the tensor {root}", seed.meta());
                if self.track { seed.clone() } else { seed.detach() }
            }
            None => {
                assert!(
                    root.shape.numel() == 1,
                    "backward: {root} has more than one element; see backward_with"
                );
                let value = Scalar::from_f64(root.dtype, 1.0);
                Tensor::create(Op::Full { shape: root.shape, value }, &self.root.device())
            }
        };
        let mut walk = Walk {
            keep: self.keep,
            hook: self.hook,
            heap: BinaryHeap::new(),
            grads: FxHashMap::default(),
            parts: FxHashMap::default(),
            waiting: FxHashMap::default(),
            counted: FxHashSet::default(),
            wanted: self
                .wanted
                .iter()
                .filter_map(|t| match &t.edge {
                    Some(Edge::Step(step, out)) => Some((step.number, *out)),
                    _ => None,
                })
                .collect(),
            recorder: Recorder::new(self.root.value.device(), Origin::here(), []),
            origin: Origin::here(),
            done: Gradients::default(),
        };
        let walked = tape::with_grad(self.track, || {
            walk.expect(edge);
            walk.contribute(edge, seed);
            walk.settle(edge);
            walk.run()
        });
        // Not inside, where the panic would be at a line of the walk instead of the caller's.
        match walked {
            Ok(()) => walk.done,
            Err(misuse) => panic!("backward: {misuse}"),
        }
    }
}

struct Walk<'a> {
    keep: bool,
    hook: Option<Hook<'a>>,
    /// Steps to visit, the latest on top.
    heap: BinaryHeap<Visit>,
    /// Gradients so far of the results of steps in the heap.
    grads: FxHashMap<Number, SmallVec<[Option<Tensor>; 1]>>,
    /// What slices of such a result contributed to it.
    parts: FxHashMap<(Number, u32), Vec<Part>>,
    /// How many more contributions each leaf gets; counted only where a hook waits for the last.
    waiting: FxHashMap<u64, usize>,
    /// Steps whose contributions are in `waiting`.
    counted: FxHashSet<Number>,
    wanted: Vec<(Number, u32)>,
    recorder: Recorder,
    /// Of the step that is visited: where sums of gradients come from.
    origin: Origin,
    done: Gradients,
}

/// The gradient of `start..end` along an axis.
struct Part {
    axis: u8,
    start: usize,
    end: usize,
    gradient: Tensor,
}

/// What parts of a value come to. Parts that lie side by side and make up the whole, as those of a value that was split,
/// are put together; others are added into zeros.
fn whole(mut parts: Vec<Part>, meta: Meta, origin: Origin) -> Option<Tensor> {
    parts.sort_by_key(|part| part.start);
    let axis = parts.first()?.axis;
    let mut end = 0;
    let side_by_side = parts.iter().all(|part| {
        let next = part.axis == axis && part.start == end;
        end = part.end;
        next
    });
    if side_by_side && end == meta.shape[axis as usize] {
        let gradients: Vec<&Tensor> = parts.iter().map(|part| &part.gradient).collect();
        return Some(match gradients[..] {
            [all] => all.clone(),
            _ => emit_one(Op::Move(Move::Cat { axis }), &gradients, gradients[0].value.device(), origin),
        });
    }
    let padded = parts.iter().map(|Part { axis, start, end, gradient }| {
        let value = Scalar::from_f64(meta.dtype, 0.0);
        let device = gradient.value.device();
        let zeros = emit_one(Op::Full { shape: meta.shape, value }, &[], device, origin);
        let assign = Move::Assign { axis: *axis, start: *start, end: *end, step: 1 };
        emit_one(Op::Move(assign), &[&zeros, gradient], device, origin)
    });
    padded.reduce(|sum, part| add(&sum, &part, origin))
}

struct Visit(Arc<GradStep>);

impl Ord for Visit {
    fn cmp(&self, other: &Visit) -> std::cmp::Ordering {
        self.0.number.cmp(&other.0.number)
    }
}
impl PartialOrd for Visit {
    fn partial_cmp(&self, other: &Visit) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Visit {
    fn eq(&self, other: &Visit) -> bool {
        self.0.number == other.0.number
    }
}
impl Eq for Visit {}

impl Walk<'_> {
    /// Counts the contributions that every leaf reachable from `root` will get.
    fn expect(&mut self, root: &Edge) {
        if self.hook.is_none() {
            return;
        }
        let mut edges = vec![root];
        while let Some(edge) = edges.pop() {
            match edge {
                Edge::Leaf(leaf) => *self.waiting.entry(leaf.id).or_default() += 1,
                Edge::Step(step, _) => {
                    if self.counted.insert(step.number) {
                        edges.extend(step.edges.iter().flatten());
                    }
                }
            }
        }
    }

    fn contribute(&mut self, edge: &Edge, gradient: Tensor) {
        match edge {
            Edge::Leaf(leaf) => {
                let sum = match self.done.leaves.remove(&leaf.id) {
                    Some(sum) => add(&sum, &gradient, self.origin),
                    None => gradient,
                };
                self.done.leaves.insert(leaf.id, sum);
            }
            Edge::Step(step, out) => {
                let origin = self.origin;
                let slot = &mut self.slots(step)[*out as usize];
                *slot = Some(match slot.take() {
                    Some(sum) => add(&sum, &gradient, origin),
                    None => gradient,
                });
            }
        }
    }

    /// The gradients of a step that is to be visited.
    fn slots(&mut self, step: &Arc<GradStep>) -> &mut SmallVec<[Option<Tensor>; 1]> {
        self.grads.entry(step.number).or_insert_with(|| {
            self.heap.push(Visit(step.clone()));
            smallvec::smallvec![None; step.metas.outs()]
        })
    }

    /// One contribution fewer to wait for; a leaf's last one fires the hook. A step is visited even if nothing was
    /// contributed to it, because the leaves below it count on it.
    fn settle(&mut self, edge: &Edge) {
        if self.hook.is_none() {
            return;
        }
        let leaf = match edge {
            Edge::Leaf(leaf) => leaf,
            Edge::Step(step, _) => {
                self.slots(step);
                return;
            }
        };
        let Some(left) = self.waiting.get_mut(&leaf.id) else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        let (Some(hook), Some(gradient)) = (&mut self.hook, self.done.leaves.remove(&leaf.id)) else {
            return;
        };
        if let Some(kept) = hook(LeafGradient { id: leaf.id, gradient }) {
            self.done.leaves.insert(leaf.id, kept);
        }
    }

    fn run(&mut self) -> Result<(), String> {
        while let Some(Visit(step)) = self.heap.pop() {
            let key = step.number;
            self.origin = Origin { backward: true, ..step.origin };
            let mut grads = self.grads.remove(&key).unwrap_or_default();
            for (out, grad) in grads.iter_mut().enumerate() {
                if let Some(parts) = self.parts.remove(&(key, out as u32)) {
                    let parts = whole(parts, step.metas.result(out), self.origin);
                    *grad = match (grad.take(), parts) {
                        (Some(sum), Some(parts)) => Some(add(&sum, &parts, self.origin)),
                        (sum, parts) => sum.or(parts),
                    };
                }
            }
            for (out, grad) in grads.iter().enumerate() {
                if let Some(grad) = grad
                    && self.wanted.contains(&(key, out as u32))
                {
                    self.done.steps.insert((key, out as u32), grad.clone());
                }
            }
            self.visit(&step, grads)?;
        }
        Ok(())
    }

    fn visit(&mut self, step: &Arc<GradStep>, grads: SmallVec<[Option<Tensor>; 1]>) -> Result<(), String> {
        if grads.iter().all(Option::is_none) {
            step.edges.iter().flatten().for_each(|edge| self.settle(edge));
            return Ok(());
        }
        match &step.rule {
            GradRule::Op(op) => self.visit_op(step, op, grads)?,
            GradRule::Custom(rule) => {
                let gradients = rule(&grads);
                if gradients.len() != step.edges.len() {
                    return Err("a custom derivative gave another number of gradients than operands".into());
                }
                for (i, gradient) in gradients.into_iter().enumerate() {
                    let Some(edge) = &step.edges[i] else { continue };
                    if let Some(gradient) = gradient {
                        let want = step.metas.operand(i);
                        if gradient.meta() != want {
                            return Err(format!(
                                "a custom derivative gave {} for an operand of {want}",
                                gradient.meta()
                            ));
                        }
                        self.contribute(edge, gradient);
                    }
                    self.settle(edge);
                }
            }
            GradRule::Recompute(again) => {
                let Some(Some(gradient)) = grads.into_iter().next() else { return Ok(()) };
                let result = tape::with_grad(true, again);
                if let Some(edge) = &result.edge {
                    self.expect(edge);
                    self.contribute(edge, gradient);
                }
                // The step itself stood for one contribution to each leaf its function reaches.
                for edge in step.edges.iter().flatten() {
                    self.settle(edge);
                }
            }
        }
        Ok(())
    }

    fn visit_op(
        &mut self,
        step: &Arc<GradStep>,
        op: &Op,
        grads: SmallVec<[Option<Tensor>; 1]>,
    ) -> Result<(), String> {
        let saved = self.saved(step)?;
        let fresh = Recorder::new(step.device, self.origin, []);
        let mut recorder = std::mem::replace(&mut self.recorder, fresh);
        recorder.reset(step.device, self.origin);
        self.contributions(step, op, grads, saved, &recorder);
        self.recorder = recorder;
        Ok(())
    }

    fn contributions(
        &mut self,
        step: &Arc<GradStep>,
        op: &Op,
        grads: SmallVec<[Option<Tensor>; 1]>,
        saved: SavedValues,
        recorder: &Recorder,
    ) {
        let (operands, results) = (step.edges.len(), step.metas.outs());
        let grads: SmallVec<[Option<V<'_>>; 1]> = (grads.into_iter().enumerate())
            .map(|(i, grad)| grad.map(|g| V::new(recorder, recorder.push(Some(g), step.metas.result(i)))))
            .collect();
        let mut saved = saved.into_iter().peekable();
        let mut next = |i: usize| saved.next_if(|(at, _)| *at == i as u32).map(|(_, value)| value);
        let mut ins: SmallVec<[V<'_>; 3]> = SmallVec::new();
        for i in 0..operands {
            let tensor = next(i).map(|value| Tensor { value, edge: step.edges[i].clone() });
            ins.push(V::new(recorder, recorder.push(tensor, step.metas.operand(i))));
        }
        let mut outs: SmallVec<[V<'_>; 1]> = SmallVec::new();
        for i in 0..results {
            let edge = || Some(Edge::Step(step.clone(), i as u32));
            let tensor = next(operands + i).map(|value| Tensor { value, edge: edge() });
            outs.push(V::new(recorder, recorder.push(tensor, step.metas.result(i))));
        }
        let rule = kiln_grad::Rule { grads: &grads, ins: &ins, outs: &outs };
        if let (Op::Move(Move::Slice { axis, start, end, step: 1 }), [Some(edge @ Edge::Step(from, out))]) =
            (op, &step.edges[..])
            && let Some(gradient) = grads.first().copied().flatten()
        {
            let gradient = recorder.tensor(gradient.key());
            let part = Part { axis: *axis, start: *start, end: *end, gradient };
            self.slots(from);
            self.parts.entry((from.number, *out)).or_default().push(part);
            return self.settle(edge);
        }
        // Leaves come first: what their hook starts need not wait for what the walk goes on with.
        let edges = || step.edges.iter().enumerate().filter_map(|(i, edge)| Some((i, edge.as_ref()?)));
        let leaves = edges().filter(|(_, edge)| matches!(edge, Edge::Leaf(_)));
        for (i, edge) in leaves.chain(edges().filter(|(_, edge)| matches!(edge, Edge::Step(..)))) {
            if let Some(gradient) = kiln_grad::gradient(op, &rule, i) {
                // A hook has what it is given to itself.
                let alone = self.hook.is_some() && matches!(edge, Edge::Leaf(_));
                let key = gradient.key();
                self.contribute(edge, if alone { recorder.take(key) } else { recorder.tensor(key) });
            }
            self.settle(edge);
        }
    }

    fn saved(&self, step: &GradStep) -> Result<SavedValues, String> {
        let mut saved = step.saved.lock().unwrap_or_else(|e| e.into_inner());
        let taken = if self.keep { saved.clone() } else { saved.take() };
        taken.ok_or_else(|| {
            format!(
                "this graph was differentiated before and its saved values are released; \
                     use differentiate().retain_graph() the first time (step recorded at {})",
                step.origin
            )
        })
    }
}

/// A gradient that is the sum of two.
fn add(a: &Tensor, b: &Tensor, origin: Origin) -> Tensor {
    emit_one(Op::Binary(Binary::Add), &[a, b], a.value.device(), origin)
}

/// # Between devices
impl Tensor {
    /// The same value on another device. Between two servers the bytes go straight from one to the other, and a
    /// failure of the value is told where the result is read.
    #[doc(alias("to", "cuda", "cpu"))]
    #[track_caller]
    pub fn to_device(&self, device: &Device) -> Result<Tensor, kiln_device::Error> {
        if self.value.device() == device {
            return Ok(self.clone());
        }
        let moved = match crate::lane::fetch(device, &self.value) {
            Some(value) => Tensor { value, edge: None },
            None => Tensor::from_data(self.to_data()?, device),
        };
        Ok(match (&self.edge, tape::is_grad_enabled()) {
            (Some(_), true) => {
                let home = self.device();
                crate::checkpoint::attach(
                    &[self],
                    moved,
                    Box::new(move |grads| {
                        let back = |g: &Tensor| match g.to_device(&home) {
                            Ok(moved) => moved,
                            Err(e) => panic!("a gradient of {} could not be moved to {home}: {e}", g.meta()),
                        };
                        vec![grads[0].as_ref().map(back)]
                    }),
                )
            }
            _ => moved,
        })
    }
}
