//! The engine with a device and a fuser of a few lines: values are lists of f32, and `mul` followed by `add` runs as one.

use kiln_device::{Error, Place};
use kiln_fuse::{Engine, Fuser, Handles, Limits, Optimization, Status, Window};
use kiln_ir::{Binary, Id, Item, Meta, Node, Op, Unary, text};
use std::collections::HashMap;
use std::sync::Arc;

type List = Vec<f32>;

/// A device: values by name, and how often each kind of step ran.
#[derive(Default)]
struct Toy {
    values: HashMap<Id, List>,
    single: usize,
    fused: usize,
}

impl Handles<List> for Toy {
    fn get(&self, id: Id) -> Option<&List> {
        self.values.get(&id)
    }
    fn put(&mut self, id: Id, value: List) {
        self.fused += 1;
        self.values.insert(id, value);
    }
    fn run(&mut self, _: usize, node: &Node, _: &[Id]) {
        self.single += 1;
        let x = |i: usize| self.values[&node.ins[i]].clone();
        let zip = |f: fn(f32, f32) -> f32| x(0).iter().zip(x(1)).map(|(a, b)| f(*a, b)).collect();
        let out: List = match &node.op {
            Op::Binary(Binary::Mul) => zip(|a, b| a * b),
            Op::Binary(Binary::Add) => zip(|a, b| a + b),
            Op::Unary(Unary::Neg) => x(0).iter().map(|v| -v).collect(),
            op => panic!("the toy does not know {op}"),
        };
        self.values.insert(node.outs[0], out);
    }
    fn free(&mut self, id: Id) {
        assert!(self.values.remove(&id).is_some(), "{id} is freed but was not there");
    }
    fn place(&self) -> Place {
        Place::Reuse
    }
}

/// Takes a product and the sum that uses it.
#[derive(Clone, Default)]
struct MulAdd {
    places: Vec<usize>,
    closed: bool,
    fail: bool,
}

impl Fuser<List> for MulAdd {
    fn name(&self) -> &'static str {
        "muladd"
    }
    fn offer(&mut self, at: usize, window: &Window<'_>) -> Status {
        let wanted = match (self.places.len(), window.node(at).map(|n| &n.op)) {
            (0, Some(Op::Binary(Binary::Mul))) => true,
            (1, Some(Op::Binary(Binary::Add))) => {
                let product = window.node(self.places[0]).map(|n| n.outs[0]);
                window.node(at).is_some_and(|n| Some(n.ins[0]) == product)
                    && product.is_some_and(|p| !window.leaves(p, &[self.places[0], at]))
            }
            _ => false,
        };
        if wanted {
            self.places.push(at)
        } else {
            self.closed = true
        }
        self.status()
    }
    fn status(&self) -> Status {
        if self.closed { Status::Closed } else { Status::Open }
    }
    fn score(&self, _: &Window<'_>) -> f64 {
        self.places.len() as f64
    }
    fn ready(&self) -> bool {
        self.places.len() == 2
    }
    fn len(&self) -> usize {
        self.places.len()
    }
    fn reset(&mut self) {
        *self = MulAdd { fail: self.fail, ..MulAdd::default() };
    }
    fn boxed(&self) -> Box<dyn Fuser<List>> {
        Box::new(self.clone())
    }
    fn finish(&self, _: &Window<'_>) -> Arc<dyn Optimization<List>> {
        Arc::new(Fused { fail: self.fail })
    }
    fn rebuild(&self, state: &[u8]) -> Option<Arc<dyn Optimization<List>>> {
        state.is_empty().then(|| Arc::new(Fused { fail: false }) as _)
    }
}

struct Fused {
    fail: bool,
}

impl Optimization<List> for Fused {
    fn name(&self) -> String {
        "muladd".into()
    }
    fn len(&self) -> usize {
        2
    }
    fn execute(&self, nodes: &[&Node], _: &[Id], handles: &mut dyn Handles<List>) -> Result<(), Error> {
        if self.fail {
            return Err(Error::Stopped);
        }
        let x = |id: Id| handles.get(id).cloned().ok_or(Error::UnknownValue(id));
        let (a, b, c) = (x(nodes[0].ins[0])?, x(nodes[0].ins[1])?, x(nodes[1].ins[1])?);
        let out = a.iter().zip(b).zip(c).map(|((a, b), c)| a * b + c).collect();
        handles.put(nodes[1].outs[0], out);
        Ok(())
    }
    fn state(&self) -> Vec<u8> {
        Vec::new()
    }
}

/// Runs a text program twice through one engine; gives the last run's toy and what the engine did.
fn run(program: &str, fuser: MulAdd) -> (Toy, kiln_fuse::Stats) {
    let program = text::parse(program).unwrap();
    let metas: HashMap<Id, Meta> = program.inputs.iter().copied().collect();
    let mut engine = Engine::new(vec![Box::new(fuser) as Box<dyn Fuser<List>>], Limits::default());
    let mut toy = Toy::default();
    for round in 0..2 {
        toy = Toy::default();
        for (i, (id, meta)) in program.inputs.iter().enumerate() {
            toy.values.insert(*id, (0..meta.shape.numel()).map(|k| (i + k + round) as f32).collect());
        }
        let plan = engine.plan(&program.items, &|id| metas.get(&id).copied()).unwrap();
        engine.replay(plan, &program.items, &mut toy);
    }
    (toy, engine.stats())
}

fn unfused(program: &str) -> Toy {
    run(program, MulAdd { closed: true, ..MulAdd::default() }).0
}

const CHAIN: &str = "a = input f32[3]\nb = input f32[3]\nc = mul a b\nd = add c a\nfree c";

#[test]
fn a_pattern_runs_as_one_and_is_planned_once() {
    let (toy, stats) = run(CHAIN, MulAdd::default());
    assert_eq!((toy.fused, toy.single), (1, 0));
    assert_eq!((stats.windows, stats.hits, stats.planned, stats.plans), (2, 1, 1, 1));
    assert_eq!(stats.fused, 4);
    let plain = run(CHAIN, MulAdd { places: vec![], closed: false, fail: true }).0;
    assert_eq!(toy.values, plain.values, "a failing optimisation leaves its nodes to run unfused");
    assert_eq!(plain.single, 2);
}

#[test]
fn interleaved_chains_still_fuse() {
    let text = "a = input f32[2]\nb = input f32[2]\np = mul a b\nq = mul b b\nx = add p a\ny = add q b\nfree p\nfree q";
    let (toy, _) = run(text, MulAdd::default());
    assert_eq!((toy.fused, toy.single), (2, 0));
}

#[test]
fn a_value_that_is_needed_elsewhere_is_kept() {
    let text = "a = input f32[2]\nb = input f32[2]\nc = mul a b\nd = add c a\ne = neg c\nfree c";
    let (toy, _) = run(text, MulAdd::default());
    assert_eq!((toy.fused, toy.single), (0, 3));
    assert_eq!(toy.values, unfused(text).values);
}

#[test]
fn a_group_never_waits_for_itself() {
    // The sum needs the negative of the product: fusing product and sum would put the negative after its user.
    let text = "a = input f32[2]\nb = input f32[2]\nc = mul a b\nn = neg c\nd = add c n\nfree c\nfree n";
    let (toy, _) = run(text, MulAdd::default());
    assert_eq!(toy.values, unfused(text).values);
}

#[test]
fn plans_are_bounded() {
    let mut engine = Engine::new(
        vec![Box::new(MulAdd::default()) as Box<dyn Fuser<List>>],
        Limits { bytes: 4096, ..Limits::default() },
    );
    for n in 1..20 {
        let mut items: Vec<Item> = Vec::new();
        for i in 0..n {
            items.push(Item::Run(Node::new(Op::Unary(Unary::Neg), &[Id(i)], &[Id(i + 1)])));
        }
        let meta = Meta::new(kiln_ir::DType::F32, [2]);
        engine.plan(&items, &|id| (id == Id(0)).then_some(meta)).unwrap();
        assert!(engine.stats().bytes <= 6000, "{:?}", engine.stats());
    }
    assert_eq!(engine.stats().planned, 19);
    assert!(engine.stats().plans < 10);
}

#[test]
fn a_window_that_does_not_fit_together_is_not_planned() {
    let items = [Item::Run(Node::new(Op::Unary(Unary::Neg), &[Id(7)], &[Id(8)]))];
    let mut engine =
        Engine::new(vec![Box::new(MulAdd::default()) as Box<dyn Fuser<List>>], Limits::default());
    assert!(engine.plan(&items, &|_| None).is_none());
}
