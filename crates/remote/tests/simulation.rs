//! Client and server over a link that a seed decides: connections break at any byte, servers crash, leases end. Whatever
//! happens, every read gives the bits of an undisturbed run, and nothing is executed twice or left out.

use kiln_cpu::Cpu;
use kiln_device::{Batch, Bytes, Data, Device, Pending, Place, Urgency, pending};
use kiln_ir::{Id, Item, Meta, Node, Op, text::parse_op};
use kiln_remote::client::core::{Config, Core, Login, Step, bytes, control};
use kiln_remote::client::moves::Errand;
use kiln_remote::client::spill::store;
use kiln_remote::protocol::frame::Decoder;
use kiln_remote::protocol::message::{Message, kind};
use kiln_remote::server::registry::{self, Admitted, Client, Registry};
use kiln_remote::server::session::{self, Quota};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}

fn server(seed: u64) -> Registry {
    let random = Mutex::new(Random(seed));
    Registry::new(registry::Config {
        token: Some(b"token".to_vec()),
        quota: Quota::default(),
        most_sessions: 4,
        lease: Duration::from_millis(1000),
        heartbeat: Duration::from_millis(100),
        offered: vec!["cpu".into()],
        devices: Box::new(|_| Some(Arc::new(Cpu::start()))),
        random: Box::new(move |bytes| {
            let mut random = random.lock().unwrap();
            bytes.iter_mut().for_each(|b| *b = random.next() as u8);
        }),
    })
}

fn client() -> Core {
    Core::new(Config {
        peer: "simulated".into(),
        program: "simulation".into(),
        most_lineage: 1 << 30,
        // Now and then a snapshot goes to a file.
        most_snapshot: 150,
        most_stored: 1 << 20,
        replay_micros: 200,
        replay_bytes: 4096,
        any_numerics: false,
    })
}

fn login() -> Login {
    Login { device: String::new(), token: b"token".to_vec(), recover: true, compress: false }
}

/// One direction of a connection: bytes on their way.
#[derive(Default)]
struct Pipe(VecDeque<u8>);

impl Pipe {
    fn put(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }

    fn take(&mut self, most: usize) -> Vec<u8> {
        let n = most.min(self.0.len());
        self.0.drain(..n).collect()
    }
}

#[derive(Default)]
struct Connection {
    up: Pipe,
    down: Pipe,
    at_server: Decoder,
    at_client: Decoder,
    admitted: Option<(Arc<Client>, u64)>,
}

struct World {
    random: Random,
    registry: Registry,
    core: Core,
    connection: Option<Connection>,
    now: Duration,
    crashes: u64,
    cuts: u64,
    stored: u64,
    seed: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let registry = server(seed);
        let random = Random(seed ^ 0xabcd);
        World {
            random,
            registry,
            core: client(),
            connection: None,
            now: Duration::ZERO,
            crashes: 0,
            cuts: 0,
            stored: 0,
            seed,
        }
    }

    /// One small thing happens.
    fn step(&mut self, faults: bool) {
        self.now += Duration::from_millis(self.random.below(20));
        if faults && self.random.chance(60) {
            self.cut();
        }
        if faults && self.random.chance(400) {
            self.crashes += 1;
            self.registry = server(self.seed.wrapping_add(self.crashes * 7919));
            self.cut();
        }
        if faults && self.random.chance(300) {
            // Away for longer than the lease.
            self.cut();
            self.now += Duration::from_millis(1500);
        }
        self.registry.expire(self.now);
        for client in self.registry.list() {
            if self.random.chance(2) {
                client.work().unwrap();
            }
        }
        let Some(mut connection) = self.connection.take() else {
            let mut connection = Connection::default();
            connection.up.put(&self.core.hello(&login(), false));
            self.connection = Some(connection);
            return;
        };
        if self.pump(&mut connection) {
            self.connection = Some(connection);
        } else {
            self.gone(&connection);
        }
        self.core.answers().into_iter().for_each(|answer| answer.give());
        for errand in self.core.errands() {
            if let Errand::Store(values) = errand {
                self.stored += values.len() as u64;
                self.core.stored(store(&values));
            }
        }
    }

    fn cut(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.cuts += 1;
            self.gone(&connection);
        }
    }

    fn gone(&mut self, connection: &Connection) {
        self.core.disconnected();
        if let Some((client, epoch)) = &connection.admitted {
            self.registry.lost(client, *epoch, self.now);
        }
    }

    /// Moves some bytes each way. False if the connection ends.
    fn pump(&mut self, c: &mut Connection) -> bool {
        while let Some(out) = self.core.next() {
            c.up.put(&bytes(out).unwrap());
        }
        let soon = self.random.chance(3);
        let mut controls = Vec::new();
        self.core.controls(soon, &mut controls);
        c.up.put(&controls);
        let most = self.random.below(3000) as usize;
        c.at_server.feed(&c.up.take(most));
        while let Some(frame) = c.at_server.next().unwrap() {
            match &c.admitted {
                None => {
                    assert_eq!(frame.kind, kind::HELLO);
                    match self.registry.hello(frame.payload, false, self.now) {
                        Ok((welcome, Admitted::Session(client, epoch))) => {
                            c.down.put(&control(kind::WELCOME, &welcome.encode()));
                            c.admitted = Some((client, epoch));
                        }
                        Ok(_) => panic!("only sessions here"),
                        Err(refusal) => c.down.put(&control(kind::REFUSED, &refusal.encode())),
                    }
                }
                Some((client, epoch)) => {
                    if !client.is_current(*epoch) {
                        return false;
                    }
                    let step = client.session().receive(&frame).unwrap();
                    assert_eq!(step, session::Step::Going);
                }
            }
        }
        if let Some((client, epoch)) = &c.admitted
            && client.is_current(*epoch)
        {
            let mut half = client.session();
            while let Some(out) = half.next() {
                c.down.put(&bytes(out).unwrap());
            }
            for notice in half.notices(self.random.chance(3)) {
                let (kind, body) = Message::encode(&notice);
                c.down.put(&control(kind, &body.fields));
            }
        }
        let most = self.random.below(3000) as usize;
        c.at_client.feed(&c.down.take(most));
        while let Some(frame) = c.at_client.next().unwrap() {
            match self.core.receive(&frame).unwrap() {
                Step::Going | Step::Opened(_) => {}
                Step::Unfit(error) => panic!("one kind of server: {error}"),
                Step::Refused(_) => {
                    // The session is gone: a new one is opened and rebuilt.
                    let mut fresh = Connection::default();
                    fresh.up.put(&self.core.hello(&login(), true));
                    *c = fresh;
                    return true;
                }
                Step::Leave => return false,
            }
        }
        true
    }
}

/// A random program over a handful of small vectors, its reads compared with a local run.
fn run(seed: u64, faults: bool) -> (u64, u64, u64, kiln_remote::client::core::Stats) {
    let mut world = World::new(seed);
    while world.core.info().is_none() {
        world.step(false);
    }
    let local = Cpu::start();
    let mut random = Random(seed ^ 0x5eed);
    let meta = Meta::new(kiln_ir::DType::F32, [8]);
    let mut live: Vec<Id> = Vec::new();
    let mut next = 1u64;
    let mut reads: Vec<(Pending<Data>, Pending<Data>)> = Vec::new();
    let ops = ["add", "mul", "sub", "maximum"].map(|name| parse_op(name).unwrap());
    for _ in 0..60 {
        match random.below(10) {
            0 | 1 => {
                let content: Vec<u8> = (0..8)
                    .flat_map(|_| ((random.below(2000) as f32 - 1000.0) / 512.0).to_le_bytes())
                    .collect();
                let data = Data::new(meta, Bytes::new(content));
                let id = Id(next);
                next += 1;
                world.core.write(id, data.clone(), Place::Reuse);
                local.write(id, data, Place::Reuse);
                live.push(id);
            }
            2..=6 if live.len() >= 2 => {
                let mut items = Vec::new();
                for _ in 0..1 + random.below(4) {
                    let op: Op = ops[random.below(4) as usize].clone();
                    let pick =
                        |random: &mut Random, live: &Vec<Id>| live[random.below(live.len() as u64) as usize];
                    let (a, b) = (pick(&mut random, &live), pick(&mut random, &live));
                    items.push(Item::Run(Node::new(op, &[a, b], &[Id(next)])));
                    live.push(Id(next));
                    next += 1;
                    if live.len() > 6 {
                        let at = random.below(live.len() as u64) as usize;
                        items.push(Item::Free(live.swap_remove(at)));
                    }
                }
                let batch = Batch { items, urgency: Urgency::Now, ..Batch::default() };
                world.core.submit(batch.clone());
                local.submit(batch);
            }
            7 if !live.is_empty() && random.chance(2) => {
                // A choice of elements, one of which may not exist: then its result, and what follows from it, fails.
                let wrong = random.chance(3).then(|| random.below(8));
                let choice = (0..8).map(|i| if wrong == Some(i) { 9 } else { random.below(8) as i64 });
                let content: Vec<u8> = choice.flat_map(i64::to_le_bytes).collect();
                let data = Data::new(Meta::new(kiln_ir::DType::I64, [8]), Bytes::new(content));
                let (index, out) = (Id(next), Id(next + 1));
                next += 2;
                let from = live[random.below(live.len() as u64) as usize];
                let gather = Node::new(parse_op("gather axis=0").unwrap(), &[from, index], &[out]);
                let items = vec![Item::Run(gather), Item::Free(index)];
                let batch = Batch { items, urgency: Urgency::Now, ..Batch::default() };
                world.core.write(index, data.clone(), Place::Reuse);
                local.write(index, data, Place::Reuse);
                world.core.submit(batch.clone());
                local.submit(batch);
                live.push(out);
            }
            _ if !live.is_empty() => {
                let id = live[random.below(live.len() as u64) as usize];
                let (promise, answer) = pending(None);
                world.core.read(id, Some(meta), promise);
                reads.push((answer, local.read(id)));
            }
            _ => {}
        }
        for _ in 0..random.below(12) {
            world.step(faults);
        }
    }
    let (promise, done) = pending(None);
    world.core.sync(promise);
    for step in 0.. {
        world.step(faults && step < 200);
        if done.take().is_some_and(|answer| answer.is_ok()) {
            break;
        }
        assert!(step < 100_000, "seed {seed}: no end; {:?}", world.core);
    }
    for (at, (remote, local)) in reads.into_iter().enumerate() {
        match (remote.take().expect("answered before the sync"), local.wait()) {
            (Ok(remote), Ok(local)) => {
                let same = remote.meta == local.meta && *remote.bytes == *local.bytes;
                assert!(same, "seed {seed}: read {at} differs");
            }
            (Err(remote), Err(local)) => assert_eq!(remote.root(), local.root(), "seed {seed}: read {at}"),
            (remote, local) => panic!("seed {seed}: read {at} is {remote:?}, not {local:?}"),
        }
    }
    (world.cuts, world.crashes, world.stored, world.core.stats())
}

#[test]
fn undisturbed_runs_give_the_same_bits() {
    for seed in 0..50 {
        let (cuts, crashes, _, stats) = run(seed, false);
        assert_eq!((cuts, crashes, stats.replayed, stats.resumed), (0, 0, 0, 0));
    }
}

#[test]
fn a_disk_that_is_full_costs_recovery_and_nothing_else() {
    let mut world = World::new(0);
    while world.core.info().is_none() {
        world.step(false);
    }
    world.core.stored(Err(std::io::Error::other("no space left")));
    let told = world.core.events();
    assert!(told.iter().any(|e| e.contains("recovery is off") && e.contains("no space left")), "{told:?}");
    assert!(world.core.stats().held.entries == 0 && world.core.info().is_some());
}

#[test]
fn disturbed_runs_give_the_same_bits() {
    let seeds = std::env::var("KILN_SEEDS").ok().and_then(|v| v.parse().ok()).unwrap_or(500);
    let (mut cuts, mut crashes, mut resumed, mut replayed, mut snapshots, mut stored) = (0, 0, 0, 0, 0, 0);
    for seed in 0..seeds {
        let (c, k, s, stats) = run(seed, true);
        stored += s;
        cuts += c;
        crashes += k;
        resumed += stats.resumed;
        replayed += stats.replayed;
        snapshots += stats.held.snapshots;
    }
    println!(
        "{seeds} seeds: {cuts} cuts, {crashes} crashes, {resumed} resumed, {replayed} replayed, {snapshots} snapshots, \
        {stored} values in files"
    );
    // The test must have tested something.
    assert!(
        cuts > seeds
            && crashes > seeds / 4
            && resumed > seeds
            && replayed > seeds / 4
            && snapshots > seeds / 4
            && stored > seeds / 4
    );
}
