//! Programs made of choices: the input's bytes are what a generator draws from, so that most of what comes of it is a
//! program that means something, with hostile extents, reused names, huge paddings and cut transfers here and there.
//!
//! A program runs against a session of a server with a small quota, or against the devices themselves: then `cpu` and
//! `reference` must agree. What takes too long is stopped; what does not stop then, a process that grows beyond the
//! quota, and a process that dies are findings.

use crate::Random;
use crate::raw::hello;
use kiln_cpu::{Cpu, Reference, pool};
use kiln_device::{Batch, Bytes, Data, Driver, Error, Place};
use kiln_ir::wire::Table;
use kiln_ir::{
    AxisSet, DType, Dims, Field, FieldSource, FormError, Id, Item, Meta, Move, Node, Op, Real, Scalar, Shape,
    infer,
};
use kiln_remote::protocol::Frame;
use kiln_remote::protocol::greeting::Purpose;
use kiln_remote::protocol::message::{Message, pieces};
use kiln_remote::protocol::template::{difference, split};
use kiln_remote::server::registry::{Config, Registry, Visitor};
use kiln_remote::server::session::{Quota, SessionEvent};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// What a device may hold.
const QUOTA: usize = 16 << 20;
/// How much more than its quotas the process may grow.
const SLACK: usize = 128 << 20;
/// How long a program may compute before it is stopped, and how long it may take to stop.
const PATIENCE: Duration = Duration::from_millis(200);
const STUCK: Duration = Duration::from_secs(60);
/// Elements that are worked on from which on an operation is rarely made.
const MUCH: usize = 1 << 20;

/// Choices: the input's bytes while there are some, then numbers that follow from them.
struct Choices<'a> {
    rest: &'a [u8],
    random: Random,
    /// Shapes that were seen.
    shapes: Vec<Shape>,
}

const SMALL: [usize; 12] = [1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 64, 65];
const HOSTILE: [usize; 14] = [
    0,
    63,
    512,
    513,
    16384,
    65536,
    1 << 20,
    1 << 31,
    (1 << 31) + 1,
    u32::MAX as usize,
    1 << 45,
    (1 << 45) + 1,
    1 << 58,
    usize::MAX,
];

impl Choices<'_> {
    fn below(&mut self, n: u64) -> u64 {
        match self.rest.split_first() {
            Some((&byte, rest)) if n <= 256 => {
                self.rest = rest;
                byte as u64 % n
            }
            _ => self.random.below(n),
        }
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }

    fn extent(&mut self) -> usize {
        if self.one_in(12) { self.of(&HOSTILE) } else { self.of(&SMALL) }
    }

    fn shape(&mut self) -> Shape {
        if !self.shapes.is_empty() && !self.one_in(4) {
            let at = self.below(self.shapes.len() as u64) as usize;
            let mut shape = self.shapes[at];
            if self.one_in(4) && !shape.is_empty() {
                let axis = self.below(shape.len() as u64) as usize;
                shape[axis] = self.extent();
            }
            return shape;
        }
        let rank = self.below(5);
        Dims::collect((0..rank).map(|_| self.extent()))
    }

    /// A number of three, of which most are `plain`.
    fn triple(&mut self, plain: u32) -> [u32; 3] {
        [(); 3].map(|()| match self.below(16) {
            0 => self.of(&HOSTILE) as u32,
            1..5 => self.below(4) as u32,
            _ => plain,
        })
    }
}

impl FieldSource for Choices<'_> {
    fn get(&mut self, key: &'static str, like: Field) -> Result<Field, FormError> {
        Ok(match like {
            Field::Shape(_) => Field::Shape(self.shape()),
            Field::Scalar(_) => {
                let dtype = self.of(&DType::ALL);
                let dtype = if dtype.is_quantised() { DType::F32 } else { dtype };
                let value = self.of(&[0.0, -0.0, 1.0, 2.0, -1.5, 3e9, f64::NAN, f64::INFINITY]);
                Field::Scalar(Scalar::from_f64(dtype, value))
            }
            Field::DType(_) => Field::DType(self.of(&DType::ALL)),
            Field::Axis(_) => Field::Axis(if self.one_in(32) { 255 } else { self.below(3) as u8 }),
            Field::Axes(_) => {
                let bits = self.below(16);
                let axes = (0..8).filter(|i| bits >> i & 1 == 1);
                Field::Axes(axes.fold(AxisSet::default(), |set, axis| set.with(axis)))
            }
            Field::Order(_) => {
                let mut order: Vec<u8> = (0..1 + self.below(4) as u8).collect();
                for i in (1..order.len()).rev() {
                    order.swap(i, self.below(i as u64 + 1) as usize);
                }
                Field::Order(Dims::collect(order))
            }
            Field::Flag(_) => Field::Flag(self.one_in(2)),
            Field::Bound(_) => {
                let small = self.below(5) as usize;
                Field::Bound(if key == "step" && small == 0 {
                    1
                } else if self.one_in(12) {
                    self.extent()
                } else {
                    small
                })
            }
            Field::Word(_) => Field::Word(if self.one_in(8) { u64::MAX } else { self.below(99) }),
            Field::Real(_) => Field::Real(Real::new(self.of(&[1e-5, 0.5, 0.0, -1.0, f64::NAN]))),
            Field::Triple(_) => Field::Triple(match key {
                "kernel" => [self.of(&[1, 2, 3]), 1, 1].map(|k| if self.one_in(16) { u32::MAX } else { k }),
                "low" | "high" | "extent" => self.triple(0),
                _ => self.triple(1),
            }),
            Field::Count(_) => Field::Count(if self.one_in(12) {
                self.of(&HOSTILE) as u32
            } else {
                1 + self.below(2) as u32
            }),
            Field::Name(_) => Field::Name("nobody".into()),
            Field::Bytes(_) => Field::Bytes(Vec::new()),
        })
    }
}

/// What programs begin with: enough for every operation, and one that is large enough to be read by several at once.
const GIVEN: [(DType, &[usize]); 10] = [
    (DType::F32, &[16384]),
    (DType::F32, &[4, 64]),
    (DType::I64, &[4, 64]),
    (DType::F32, &[2, 2, 9]),
    (DType::Bool, &[4, 64]),
    (DType::BF16, &[64, 8]),
    (DType::I32, &[2, 2, 9]),
    (DType::F64, &[64, 64]),
    (DType::U8, &[4]),
    (DType::Q8, &[4, 64]),
];

/// The content of a given value: small numbers, so that integers are indices too.
fn content(meta: Meta) -> Bytes {
    static MADE: LazyLock<Vec<Bytes>> = LazyLock::new(|| {
        let made = |&(dtype, shape): &(DType, &[usize])| {
            let meta = Meta::new(dtype, shape);
            let number = |i: usize| match dtype {
                DType::Q8 => vec![(i % 3) as u8],
                _ if dtype.is_float() => {
                    Scalar::from_f64(dtype, ((i * 7919 % 101) as f64 - 50.0) / 16.0).to_bytes().to_vec()
                }
                _ => Scalar::from_i64(dtype, (i % 4) as i64).to_bytes().to_vec(),
            };
            let mut bytes: Vec<u8> = (0..meta.shape.numel()).flat_map(number).collect();
            bytes.truncate(meta.bytes());
            bytes.resize(meta.bytes(), 0);
            Bytes::new(bytes)
        };
        GIVEN.iter().map(made).collect()
    });
    let at = GIVEN.iter().position(|&(dtype, shape)| Meta::new(dtype, shape) == meta);
    MADE[at.unwrap_or(0)].clone()
}

/// A program as it is made.
struct Generated {
    given: Vec<(Id, Meta)>,
    batches: Vec<Batch>,
    /// What is defined at the end, as far as it is known.
    live: BTreeMap<u64, Meta>,
    /// Names are used once, operations fit, and none works on much.
    plain: bool,
}

fn made(choices: &mut Choices<'_>) -> Generated {
    static NAMES: LazyLock<Vec<&'static str>> = LazyLock::new(Op::names);
    let mut made = Generated { given: Vec::new(), batches: Vec::new(), live: BTreeMap::new(), plain: true };
    let mut next = 1;
    for _ in 0..2 + choices.below(4) {
        let (dtype, shape) = choices.of(&GIVEN);
        let meta = Meta::new(dtype, shape);
        made.given.push((Id(next), meta));
        made.live.insert(next, meta);
        choices.shapes.push(meta.shape);
        next += 1;
    }
    let mut freed: Vec<u64> = Vec::new();
    for _ in 0..1 + choices.below(3) {
        let mut items = Vec::new();
        for _ in 0..1 + choices.below(12) {
            let Some((op, ins, outs, fits)) = node(choices, &NAMES, &made.live) else { continue };
            made.plain &= fits;
            let mut node = Node { op, ins, outs: Default::default() };
            for meta in outs {
                let id = match choices.below(48) {
                    0 if !freed.is_empty() => choices.of(&freed),
                    1 if !made.live.is_empty() => key(choices, &made.live),
                    2 if choices.one_in(4) => {
                        choices.of(&[0, Id::LOWERED.first.0, Id::LOWERED.at(1).0, Id::NONE.0])
                    }
                    _ => {
                        next += 1;
                        next
                    }
                };
                made.plain &= id == next;
                node.outs.push(Id(id));
                made.live.insert(id, meta);
                if !choices.shapes.contains(&meta.shape) {
                    choices.shapes.push(meta.shape);
                }
            }
            let ins = node.ins.clone();
            items.push(Item::Run(node));
            if choices.one_in(3) && !made.live.is_empty() {
                let of_operand = ins.first().filter(|id| made.live.contains_key(&id.0));
                let id = match of_operand {
                    Some(id) if !choices.one_in(3) => id.0,
                    _ => key(choices, &made.live),
                };
                made.live.remove(&id);
                freed.push(id);
                items.push(Item::Free(Id(id)));
            }
        }
        let place = if choices.one_in(6) { Place::Persistent } else { Place::Reuse };
        made.batches.push(Batch { items, place, ..Batch::default() });
    }
    made
}

fn key(choices: &mut Choices<'_>, live: &BTreeMap<u64, Meta>) -> u64 {
    let at = choices.below(live.len() as u64) as usize;
    live.keys().nth(at).copied().unwrap_or(0)
}

type Chosen = (Op, smallvec::SmallVec<[Id; 3]>, Vec<Meta>, bool);

/// An operation with operands, results, and whether it fits and is little work.
fn node(choices: &mut Choices<'_>, names: &[&str], live: &BTreeMap<u64, Meta>) -> Option<Chosen> {
    for _ in 0..12 {
        let at = choices.below(names.len() as u64) as usize;
        let Ok(op) = Op::build(names[at], choices) else { continue };
        let count = match (&op, op.operands().into_inner()) {
            (Op::Custom(_), _) => 1,
            (_, (least, usize::MAX)) => least as u64 + choices.below(3),
            (_, (_, most)) => most.min(3) as u64,
        };
        for _ in 0..4 {
            if live.is_empty() && count > 0 {
                break;
            }
            let ids: Vec<u64> = (0..count).map(|_| key(choices, live)).collect();
            let metas: Vec<Meta> = ids.iter().map(|id| live[id]).collect();
            let ins = ids.into_iter().map(Id).collect();
            match infer(&op, &metas) {
                Ok(outs) => {
                    let little = work(&op, &metas, &outs) <= MUCH;
                    if !little && !choices.one_in(48) {
                        break;
                    }
                    return Some((op, ins, outs.to_vec(), little));
                }
                // One that does not fit.
                Err(_) if choices.one_in(64) => {
                    return Some((op, ins, vec![Meta::new(DType::F32, [2usize])], false));
                }
                Err(_) => {}
            }
        }
    }
    None
}

/// About how many elements an operation works on, whatever memory they take.
fn work(op: &Op, ins: &[Meta], outs: &[Meta]) -> usize {
    let count = |meta: &Meta| meta.shape.checked_numel().unwrap_or(usize::MAX);
    let all = ins.iter().chain(outs).map(count).fold(0, usize::saturating_add);
    match op {
        // Views, however large.
        Op::Full { .. }
        | Op::Move(Move::Expand(_) | Move::Permute(_) | Move::Slice { .. } | Move::Flip(_)) => 0,
        Op::Dot { .. } => {
            let k = ins[0].shape.last().copied().unwrap_or(1);
            outs.iter().map(count).fold(0, usize::saturating_add).saturating_mul(k)
        }
        Op::Conv { .. } => count(&ins[0]).saturating_mul(count(&ins[1])).max(all),
        Op::Pool { pool, .. } => {
            pool.kernel.iter().fold(all, |product, &k| product.saturating_mul(k as usize))
        }
        _ => all,
    }
}

/// The device that computes now, and since when.
static RUNNING: Mutex<Option<(Instant, Weak<dyn Driver>)>> = Mutex::new(None);
static STOPPED: AtomicU64 = AtomicU64::new(0);

/// Has a device stopped if it computes for long, until the guard is dropped.
pub(super) fn watched(device: &Arc<dyn Driver>) -> impl Drop {
    static STARTED: std::sync::Once = std::sync::Once::new();
    STARTED.call_once(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_millis(20));
                let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let Some((since, device)) = running else { continue };
                if since.elapsed() > STUCK {
                    eprintln!(
                        "a program does not end {STUCK:?} after it began, though its device was stopped"
                    );
                    std::process::abort();
                }
                if since.elapsed() > PATIENCE
                    && let Some(device) = device.upgrade()
                {
                    STOPPED.fetch_add(1, Ordering::Relaxed);
                    device.stop();
                }
            }
        });
    });
    struct Over;
    impl Drop for Over {
        fn drop(&mut self) {
            *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
    *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), Arc::downgrade(device)));
    Over
}

/// A program of the input's choices, on a server's session or on the devices themselves.
pub fn grammar(input: &[u8]) -> u64 {
    let seed = super::targets::number(input);
    let mut choices = Choices { rest: input, random: Random(seed), shapes: Vec::new() };
    pool::set_threads(1 + choices.below(2) as usize);
    let served = choices.one_in(2);
    let made = made(&mut choices);
    let outcome = if served { serve(&made, &mut choices) } else { compute(&made) };
    bounded();
    super::targets::number((served, made.plain, outcome))
}

/// The process has not grown by more than the quotas allow.
fn bounded() {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static FIRST: AtomicU64 = AtomicU64::new(0);
    let pages = || -> Option<u64> {
        std::fs::read_to_string("/proc/self/statm").ok()?.split_whitespace().nth(1)?.parse().ok()
    };
    if !COUNT.fetch_add(1, Ordering::Relaxed).is_multiple_of(64) {
        return;
    }
    let Some(now) = pages() else { return };
    if FIRST.load(Ordering::Relaxed) == 0 {
        FIRST.store(now, Ordering::Relaxed);
    }
    let grown = now.saturating_sub(FIRST.load(Ordering::Relaxed)) as usize * 4096;
    // Address sanitizers keep what is freed for a while.
    let slack = if std::env::var_os("ASAN_OPTIONS").is_some() { 16 * SLACK } else { SLACK };
    assert!(grown <= 2 * QUOTA + slack, "the process grew by {} MiB", grown >> 20);
}

/// What became of a value.
fn told(answer: &Result<Data, Error>) -> u8 {
    match answer.as_ref().map_err(Error::root) {
        Ok(_) => 0,
        Err(Error::OutOfMemory { .. }) => 1,
        Err(Error::Op(_)) => 2,
        Err(Error::Index { .. }) => 3,
        Err(Error::Divide { .. }) => 4,
        Err(Error::UnknownValue(_)) => 5,
        Err(Error::Stopped) => 6,
        Err(Error::Panicked { op, message }) => panic!("{op} panicked: {message}"),
        Err(_) => 7,
    }
}

fn compute(made: &Generated) -> Vec<u8> {
    let run = |device: Arc<dyn Driver>| {
        device.limit(Some(QUOTA));
        let _watched = watched(&device);
        for (id, meta) in &made.given {
            device.write(*id, Data::new(*meta, content(*meta)), Place::Reuse);
        }
        made.batches.iter().for_each(|batch| device.submit(batch.clone()));
        let answers: Vec<_> = made.live.keys().map(|&id| device.read(Id(id)).wait()).collect();
        let held = device.memory();
        assert!(held.live_bytes <= QUOTA, "{held:?}");
        answers
    };
    let answers = run(Arc::new(Cpu::start()));
    if made.plain {
        let wanted = run(Arc::new(Reference::start()));
        for (((id, meta), got), want) in made.live.iter().zip(&answers).zip(&wanted) {
            match (got, want) {
                (Ok(got), Ok(want)) => assert!(
                    got.meta == *meta && want.meta == *meta && same(meta.dtype, &got.bytes, &want.bytes),
                    "value {id}, {meta}, differs between cpu and reference in {:?}",
                    made.batches
                ),
                // Devices take memory and time in different ways.
                _ if [1, 6].contains(&told(got)) || [1, 6].contains(&told(want)) => {}
                _ => assert_eq!(
                    told(got),
                    told(want),
                    "value {id}: {got:?} and {want:?} of {:?}",
                    made.batches
                ),
            }
        }
    }
    answers.iter().map(told).collect()
}

/// Whether two values have the same bits, whatever bits a NaN has.
fn same(dtype: DType, a: &[u8], b: &[u8]) -> bool {
    let infinity: u64 = match dtype {
        DType::F64 => 0x7ff0_0000_0000_0000,
        DType::F32 => 0x7f80_0000,
        DType::F16 => 0x7c00,
        DType::BF16 => 0x7f80,
        _ => return a == b,
    };
    let size = dtype.size();
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |word, &byte| word << 8 | byte as u64);
    let nan = |word: u64| word & (u64::MAX >> (65 - 8 * size)) > infinity;
    a.len() == b.len()
        && a.chunks(size).zip(b.chunks(size)).all(|(a, b)| a == b || nan(word(a)) && nan(word(b)))
}

/// What a client sends for a program: kinds and payloads.
fn frames(made: &Generated, choices: &mut Choices<'_>) -> Vec<(u8, Vec<u8>)> {
    static TABLE: LazyLock<Table> = LazyLock::new(Table::local);
    let mut frames: Vec<(u8, Vec<u8>)> = Vec::new();
    let mut put = |message: Message<'_>| {
        let (kind, body) = message.encode();
        frames.push((kind, [&body.fields[..], body.data.as_deref().unwrap_or(&[])].concat()));
    };
    for (transfer, (id, meta)) in made.given.iter().enumerate() {
        let transfer = transfer as u64;
        put(Message::Upload { transfer, id: *id, meta: *meta, place: Place::Reuse });
        for (_, body) in pieces(transfer, &content(*meta), false) {
            let mut bytes = body.data.as_deref().unwrap_or(&[]);
            // A transfer may be cut, or too long.
            if choices.one_in(64) {
                bytes = &bytes[..choices.below(bytes.len() as u64 + 1) as usize];
            }
            put(Message::Piece { of: transfer, bytes });
        }
    }
    for (template, batch) in made.batches.iter().enumerate() {
        let split = split(&TABLE, &batch.items, batch.place);
        let mut bindings = kiln_ir::wire::Writer::default();
        bindings.int(split.bindings.len() as u64);
        difference(&[], &split.bindings, &mut bindings);
        put(Message::Define {
            template: template as u64,
            structure: &split.structure,
            bindings: &bindings.bytes,
        });
    }
    for (request, &id) in made.live.keys().enumerate() {
        put(Message::Read { request: request as u64, id: Id(id), background: false });
    }
    put(Message::Sync { request: 999 });
    frames
}

/// What a client sends for a program of this seed.
pub fn client(seed: u64) -> Vec<(u8, Vec<u8>)> {
    let mut choices = Choices { rest: &[], random: Random(seed), shapes: Vec::new() };
    let made = made(&mut choices);
    frames(&made, &mut choices)
}

fn serve(made: &Generated, choices: &mut Choices<'_>) -> Vec<u8> {
    static GREETING: LazyLock<Vec<u8>> =
        LazyLock::new(|| hello(b"", Purpose::Open { device: String::new() }).encode());
    static OPENED: Mutex<Option<Weak<dyn Driver>>> = Mutex::new(None);
    static REGISTRY: LazyLock<Registry> = LazyLock::new(|| {
        Registry::new(Config {
            token: None,
            quota: Quota { bytes: QUOTA, values: 512 },
            most_sessions: usize::MAX,
            lease: Duration::from_secs(1),
            heartbeat: Duration::from_secs(1),
            offered: vec!["cpu".into()],
            devices: Box::new(|_| {
                let device: Arc<dyn Driver> = Arc::new(Cpu::start());
                *OPENED.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::downgrade(&device));
                Some(device)
            }),
            random: Box::new(|bytes| bytes.fill(7)),
        })
    });
    let registry = &*REGISTRY;
    let Ok((_, Visitor::Session(client, _))) = registry.hello(&GREETING, false, Duration::ZERO) else {
        unreachable!("an empty server takes a session")
    };
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(Weak::upgrade);
    let watched = opened.as_ref().map(watched);
    let (mut seq, mut outcome) = (0, Vec::new());
    for (kind, payload) in &frames(made, choices) {
        match client.session().receive(&Frame { seq: seq + 1, kind: *kind, payload }) {
            Ok(SessionEvent::Going | SessionEvent::Ping(_)) => seq += 1,
            Ok(SessionEvent::Ended) => break,
            Err(_) => {
                outcome.push(100);
                break;
            }
        }
        while let Ok(Some(_)) = client.work() {}
        let held = client.executor().device().memory();
        assert!(held.live_bytes <= QUOTA, "{held:?}");
        while let Some(out) = client.session().next() {
            outcome.push(out.head()[16]);
        }
    }
    drop(watched);
    client.end();
    registry.expire(Duration::ZERO);
    outcome
}
