//! The engine with a device and a fuser of a few lines: values are lists of f32, and `mul` followed by `add` runs as one.

use kiln_device::{Error, Place};
use kiln_fuse::{Engine, Failure, Fuser, Handles, Limits, NewPlan, Observer, Optimization, Status, Window};
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
    failed: Vec<Id>,
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
    fn fail(&mut self, _: usize, nodes: &[&Node], _: Error) {
        let outs = nodes.iter().flat_map(|node| node.outs.iter().copied());
        self.failed.extend(outs.clone());
        self.values.extend(outs.map(|id| (id, List::new())));
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
    /// Its groups write over their first operand and then fail.
    spend: bool,
    /// Its groups serve lists of the length that the first had.
    length: bool,
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
        *self = MulAdd { places: Vec::new(), closed: false, ..self.clone() };
    }
    fn boxed(&self) -> Box<dyn Fuser<List>> {
        Box::new(self.clone())
    }
    fn finish(&self, window: &Window<'_>) -> Arc<dyn Optimization<List>> {
        let first = window.node(self.places[0]).unwrap().outs[0];
        let length = self.length.then(|| window.meta(first).shape.numel());
        Arc::new(Fused { fail: self.fail, spend: self.spend, length })
    }
}

struct Fused {
    fail: bool,
    spend: bool,
    length: Option<usize>,
}

impl Optimization<List> for Fused {
    fn name(&self) -> String {
        "muladd".into()
    }
    fn len(&self) -> usize {
        2
    }
    fn holds(&self, nodes: &[&Node], handles: &dyn Handles<List>) -> bool {
        self.length.is_none_or(|length| handles.get(nodes[0].ins[0]).is_some_and(|x| x.len() == length))
    }
    fn execute(&self, nodes: &[&Node], _: &[Id], handles: &mut dyn Handles<List>) -> Result<(), Failure> {
        if self.fail {
            return Err(Error::Stopped.into());
        }
        if self.spend {
            handles.put(nodes[0].ins[0], List::new());
            return Err(Failure::Spent(Error::Stopped));
        }
        let x = |id: Id| handles.get(id).cloned().ok_or(Error::UnknownValue(id));
        let (a, b, c) = (x(nodes[0].ins[0])?, x(nodes[0].ins[1])?, x(nodes[1].ins[1])?);
        let out = a.iter().zip(b).zip(c).map(|((a, b), c)| a * b + c).collect();
        handles.put(nodes[1].outs[0], out);
        Ok(())
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
    let plain = run(CHAIN, MulAdd { fail: true, ..MulAdd::default() }).0;
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

/// A window with its inputs, for engines that plan without running.
fn window(text: &str) -> (Vec<Item>, HashMap<Id, Meta>) {
    let program = text::parse(text).unwrap();
    (program.items, program.inputs.into_iter().collect())
}

fn engine() -> Engine<List> {
    Engine::new(vec![Box::new(MulAdd::default()) as Box<dyn Fuser<List>>], Limits::default())
}

#[test]
fn windows_that_look_alike_are_told_apart() {
    let mut engine = engine();
    let mut plan = |text: &str| {
        let (items, metas) = window(text);
        engine.plan(&items, &|id| metas.get(&id).copied()).unwrap();
        let stats = engine.stats();
        (stats.planned, stats.matched, stats.hits)
    };
    assert_eq!(plan(CHAIN), (1, 0, 0));
    // The same under other names; other extents need a look at the structure; other operands are another window.
    assert_eq!(plan(CHAIN), (1, 1, 1));
    assert_eq!(plan(&CHAIN.replace("[3]", "[7]")), (1, 1, 2));
    assert_eq!(plan(&CHAIN.replace("[3]", "[7]")), (1, 2, 3));
    assert_eq!(plan(&CHAIN.replace("[3]", "[1]")), (2, 2, 3));
    assert_eq!(plan(&CHAIN.replace("add c a", "add c b")), (3, 2, 3));
    assert_eq!(plan(&CHAIN.replace("mul a b", "mul a a")), (4, 2, 3));
    assert_eq!(plan(&CHAIN.replace("free c", "free a")), (5, 2, 3));
    assert_eq!(plan(CHAIN), (5, 3, 4));
}

#[test]
fn numbers_differ_between_windows_of_one_plan() {
    let mut engine = engine();
    let text = "a = input f32[3]\nn = full shape=[3] value=f32:2.0\nb = mul a n\nc = add b a\nfree b\nfree n";
    for (number, matched) in [("2.0", 0), ("3.0", 1), ("-1.0", 2)] {
        let (items, metas) = window(&text.replace("2.0", number));
        engine.plan(&items, &|id| metas.get(&id).copied()).unwrap();
        assert_eq!((engine.stats().planned, engine.stats().matched), (1, matched));
    }
}

/// Counts what it is told.
#[derive(Clone, Default)]
struct Seen(Arc<std::sync::Mutex<Vec<String>>>);

impl Observer for Seen {
    fn planned(&mut self, plan: &NewPlan<'_>) {
        let text =
            format!("planned {} groups, {} launches, loaded {}", plan.groups, plan.launches, plan.loaded);
        self.0.lock().unwrap().push(text);
    }
    fn window(&mut self, _: u64, items: usize) {
        self.0.lock().unwrap().push(format!("window of {items}"));
    }
    fn group(&mut self, name: &str, nodes: usize) {
        self.0.lock().unwrap().push(format!("{name} of {nodes}"));
    }
    fn fallback(&mut self, name: &str, error: &Error) {
        self.0.lock().unwrap().push(format!("{name} fell back: {error}"));
    }
}

fn replay(engine: &mut Engine<List>, text: &str) -> Toy {
    let (items, metas) = window(text);
    let mut toy = Toy::default();
    toy.values.extend(metas.keys().map(|&id| (id, vec![1.0, 2.0, 3.0])));
    let plan = engine.plan(&items, &|id| metas.get(&id).copied()).unwrap();
    engine.replay(plan, &items, &mut toy);
    toy
}

#[test]
fn observers_are_told_what_is_done() {
    let (seen, mut engine) = (Seen::default(), engine());
    engine.observe(Box::new(seen.clone()));
    replay(&mut engine, CHAIN);
    replay(&mut engine, CHAIN);
    let told = std::mem::take(&mut *seen.0.lock().unwrap());
    let want = [
        "planned 1 groups, 1 launches, loaded false",
        "window of 3",
        "muladd of 2",
        "window of 3",
        "muladd of 2",
    ];
    assert_eq!(told, want);
    let fuser = MulAdd { fail: true, ..MulAdd::default() };
    let mut engine = Engine::new(vec![Box::new(fuser) as Box<dyn Fuser<List>>], Limits::default());
    engine.observe(Box::new(seen.clone()));
    replay(&mut engine, CHAIN);
    assert!(seen.0.lock().unwrap()[2].starts_with("muladd fell back: "));
    assert_eq!(engine.stats().fallbacks, 1);
}

#[test]
fn plans_are_kept_on_disk_and_damaged_ones_are_passed_over() {
    let dir = std::env::temp_dir().join(format!("kiln-plans-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    let run = |tag: &str| {
        let mut engine = engine();
        engine.cache(&dir, tag);
        let toy = replay(&mut engine, CHAIN);
        assert_eq!((toy.fused, toy.single), (1, 0));
        (engine.stats().planned, engine.stats().loaded)
    };
    assert_eq!(run("one"), (1, 0));
    assert_eq!(run("one"), (0, 1));
    assert_eq!(run("two"), (1, 0), "another version's plans are not read");
    let paths: Vec<_> = std::fs::read_dir(&dir).unwrap().flatten().map(|entry| entry.path()).collect();
    for path in &paths {
        let bytes = std::fs::read(path).unwrap();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x11;
            std::fs::write(path, &changed).unwrap();
            let mut engine = engine();
            engine.cache(&dir, "one");
            replay(&mut engine, CHAIN);
        }
    }
    for path in &paths {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    }
    assert_eq!(run("one"), (1, 0));
    assert_eq!(run("one"), (0, 1), "a damaged plan was written anew");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_group_whose_operands_are_spent_fails_and_is_not_run_again() {
    let (toy, stats) = run(CHAIN, MulAdd { spend: true, ..MulAdd::default() });
    // The product, which the group would have kept to itself, is there to be freed.
    assert_eq!((toy.single, &toy.failed[..]), (0, &[Id(2), Id(3)][..]));
    assert!(toy.values[&Id(3)].is_empty() && !toy.values.contains_key(&Id(2)));
    assert_eq!((stats.fallbacks, stats.guarded), (2, 0));
}

#[test]
fn what_a_fuser_takes_for_granted_is_asked_at_every_run() {
    let fuser = MulAdd { length: true, ..MulAdd::default() };
    let mut engine = Engine::new(vec![Box::new(fuser) as Box<dyn Fuser<List>>], Limits::default());
    // One structure, and so one plan, which was made for lists of three.
    for (length, fused) in [(3, true), (5, false), (3, true), (5, false)] {
        let (items, metas) = window(&CHAIN.replace("[3]", &format!("[{length}]")));
        let mut toy = Toy::default();
        toy.values.extend(metas.keys().map(|&id| (id, vec![2.0; length])));
        let plan = engine.plan(&items, &|id| metas.get(&id).copied()).unwrap();
        engine.replay(plan, &items, &mut toy);
        assert_eq!((toy.fused, toy.single), if fused { (1, 0) } else { (0, 2) }, "{length}");
        assert_eq!(toy.values[&Id(3)], vec![6.0; length]);
    }
    let stats = engine.stats();
    assert_eq!((stats.planned, stats.guarded, stats.fallbacks), (1, 2, 0));
}

#[test]
fn a_name_stands_for_one_value_or_there_is_no_plan() {
    let meta = Meta::new(kiln_ir::DType::F32, [2]);
    let neg = |of: u64, to: u64| Item::Run(Node::new(Op::Unary(Unary::Neg), &[Id(of)], &[Id(to)]));
    let free = |id: u64| Item::Free(Id(id));
    let (inner, again) = (Id::LOWERED.first.0, Id::RECOMPUTED.at(3).0);
    let cases = [
        vec![neg(1, 10), neg(10, 11), free(10), neg(1, 10)],
        vec![neg(1, 10), neg(1, 10)],
        // Used from outside, or ended, and then defined.
        vec![neg(2, 10), neg(1, 2)],
        vec![free(2), neg(1, 2)],
        vec![neg(1, 10), free(1), neg(1, 11)],
        vec![neg(1, 10), free(10), free(10)],
        vec![neg(1, 12), neg(12, 11), neg(11, 12)],
        // Names of the device itself.
        vec![neg(1, inner), neg(inner, 11)],
        vec![neg(1, again), neg(1, 11)],
        vec![neg(inner, 11), neg(11, 12)],
    ];
    for items in cases {
        // Not as a window that looks like one that was planned either.
        let mut names: HashMap<Id, Id> = HashMap::new();
        let mut engine = engine();
        let mut next = 1000;
        let other: Vec<Item> = (items.iter())
            .map(|item| match item {
                Item::Free(id) => Item::Free(*names.entry(*id).or_insert(*id)),
                Item::Run(node) => {
                    let mut node = node.clone();
                    for id in &mut node.ins {
                        *id = *names.entry(*id).or_insert(if id.is_reserved() { Id(7) } else { *id });
                    }
                    for id in &mut node.outs {
                        next += 1;
                        names.insert(*id, Id(next));
                        *id = Id(next);
                    }
                    Item::Run(node)
                }
            })
            .collect();
        let _ = engine.plan(&other, &|_| Some(meta));
        assert!(engine.plan(&items, &|_| Some(meta)).is_none(), "{items:?}");
    }
    // In any order, as long as each is new: the list of a lane that has older names than what it uses.
    let mut engine = engine();
    for (from, to) in [(900, [3, 4, 5]), (5000, [5, 3, 4]), (3, [7, 6, 5]), (1, [8, 10, 9])] {
        let items = [neg(from, to[0]), neg(to[0], to[1]), neg(to[1], to[2]), free(to[1])];
        assert!(engine.plan(&items, &|_| Some(meta)).is_some(), "{to:?}");
    }
    assert_eq!((engine.stats().planned, engine.stats().matched), (1, 3));
}

#[test]
fn a_plan_file_says_what_runs_together_and_nothing_of_how() {
    let dir = std::env::temp_dir().join(format!("kiln-grouping-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    let text = "a = input f32[3]\nb = input f32[3]\nn = neg a\nc = mul a b\nd = add c n\nfree c";
    let run = |fuser: MulAdd| {
        let mut engine = Engine::new(vec![Box::new(fuser) as Box<dyn Fuser<List>>], Limits::default());
        engine.cache(&dir, "grouping");
        let toy = replay(&mut engine, text);
        assert_eq!(toy.values[&Id(4)], unfused_values());
        (engine.stats().loaded, toy.fused, toy.single)
    };
    fn unfused_values() -> List {
        vec![0.0, 2.0, 6.0]
    }
    assert_eq!(run(MulAdd::default()), (0, 1, 1));
    assert_eq!(run(MulAdd::default()), (1, 1, 1));
    // The last of the group's places, with its sum set right: nodes that no fuser takes are no group.
    let path = std::fs::read_dir(&dir).unwrap().flatten().next().unwrap().path();
    let saved = std::fs::read(&path).unwrap();
    let body = saved.len() - 4;
    assert_eq!(saved[body - 2..body], [1, 2]);
    for places in [[0, 1], [0, 2], [2, 1], [1, 1], [1, 3], [1, 9], [2, 2]] {
        let mut changed = saved[..body].to_vec();
        changed[body - 2..].copy_from_slice(&places);
        let sum = crc32fast::hash(&changed[8..]).to_le_bytes();
        changed.extend_from_slice(&sum);
        std::fs::write(&path, &changed).unwrap();
        assert_eq!(run(MulAdd::default()), (0, 1, 1), "{places:?}");
        assert_eq!(run(MulAdd::default()), (1, 1, 1), "{places:?}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn plan_files_are_bounded_and_the_oldest_go_first() {
    let dir = std::env::temp_dir().join(format!("kiln-bounded-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    // Something of another kind, and what a process left behind long ago.
    std::fs::write(dir.join("notes.txt"), vec![0; 100_000]).unwrap();
    let left = std::fs::File::create(dir.join(".77-0.part")).unwrap();
    left.set_modified(std::time::SystemTime::now() - std::time::Duration::from_secs(100_000)).unwrap();
    let limits = Limits { disk: 10 * 4096, ..Limits::default() };
    let mut engine = Engine::new(vec![Box::new(MulAdd::default()) as Box<dyn Fuser<List>>], limits);
    engine.cache(&dir, "bounded");
    let meta = Meta::new(kiln_ir::DType::F32, [2]);
    let plans = || {
        let files = std::fs::read_dir(&dir).unwrap().flatten().map(|entry| entry.path());
        files.filter(|path| path.extension().is_some_and(|e| e == "plan")).collect::<Vec<_>>()
    };
    let mut first = None;
    for n in 1..40 {
        let neg = |i| Item::Run(Node::new(Op::Unary(Unary::Neg), &[Id(i)], &[Id(i + 1)]));
        let items: Vec<Item> = (0..n).map(neg).collect();
        engine.plan(&items, &|id| (id == Id(0)).then_some(meta)).unwrap();
        let here = plans();
        assert!((1..=10).contains(&here.len()), "{n}: {} files", here.len());
        if n == 1 {
            first = Some(here[0].clone());
        }
    }
    assert!(!first.unwrap().exists() && plans().len() > 5);
    assert!(dir.join("notes.txt").exists() && !dir.join(".77-0.part").exists());
    std::fs::remove_dir_all(&dir).unwrap();
}
