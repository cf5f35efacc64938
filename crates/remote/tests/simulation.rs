//! Client and server over a link that a seed decides: connections break at any byte, servers crash, leases end. Whatever
//! happens, every read gives the bits of an undisturbed run, and nothing is executed twice or left out.

use kiln_cpu::Cpu;
use kiln_device::{Batch, Bytes, Data, Driver, Error, Pending, Place, Urgency, pending};
use kiln_ir::{Id, Item, Meta, Node, Op, text::parse_op};
use kiln_remote::client::core::{Config, Core, FrameOutcome, Login};
use kiln_remote::client::faults::Faults;
use kiln_remote::client::moves::{Errand, Move, MoveSource, RECALLS, Reach, recalls_left};
use kiln_remote::client::spill::store;
use kiln_remote::protocol::frame::Decoder;
use kiln_remote::protocol::frame::control;
use kiln_remote::protocol::message::{Capability, Message, kind};
use kiln_remote::server::moves::{Fetch, Order};
use kiln_remote::server::registry::{self, Client, Registry, Visitor};
use kiln_remote::server::session::{self, Quota};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
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
    core: Arc<Mutex<Core>>,
    connection: Option<Connection>,
    now: Duration,
    crashes: u64,
    cuts: u64,
    stored: u64,
    seed: u64,
    /// What the two sides want of others.
    orders: Vec<(Arc<Client>, Order)>,
    errands: Vec<Errand>,
}

impl World {
    fn new(seed: u64) -> World {
        let registry = server(seed);
        let random = Random(seed ^ 0xabcd);
        World {
            random,
            registry,
            core: Arc::new(Mutex::new(client())),
            connection: None,
            now: Duration::ZERO,
            crashes: 0,
            cuts: 0,
            stored: 0,
            seed,
            orders: Vec::new(),
            errands: Vec::new(),
        }
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap()
    }

    /// The server is gone with everything on it, and starts again.
    fn crash(&mut self) {
        self.crashes += 1;
        self.registry.list().iter().for_each(|client| client.end());
        self.registry = server(self.seed.wrapping_add(self.crashes * 7919));
        self.cut();
    }

    /// One small thing happens.
    fn step(&mut self, faults: bool) {
        self.now += Duration::from_millis(self.random.below(20));
        if faults && self.random.chance(60) {
            self.cut();
        }
        if faults && self.random.chance(400) {
            self.crash();
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
            let hello = self.core().hello(&login(), false);
            connection.up.put(&hello);
            self.connection = Some(connection);
            return;
        };
        if self.pump(&mut connection) {
            self.connection = Some(connection);
        } else {
            self.gone(&connection);
        }
        let (answers, errands, settled) = {
            let mut core = self.core();
            (core.answers(), core.errands(), core.settled())
        };
        drop(settled);
        answers.into_iter().for_each(|answer| answer.give());
        for errand in errands {
            match errand {
                Errand::Store(values) => {
                    self.stored += values.len() as u64;
                    self.core().stored(store(&values));
                }
                errand => self.errands.push(errand),
            }
        }
        for client in self.registry.list() {
            let orders = client.session().orders();
            self.orders.extend(orders.into_iter().map(|order| (client.clone(), order)));
        }
    }

    fn cut(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.cuts += 1;
            self.gone(&connection);
        }
    }

    fn gone(&mut self, connection: &Connection) {
        self.core().disconnected();
        if let Some((client, epoch)) = &connection.admitted {
            self.registry.lost(client, *epoch, self.now);
        }
    }

    /// Moves some bytes each way. False if the connection ends.
    fn pump(&mut self, c: &mut Connection) -> bool {
        while let Some(out) = { self.core().next() } {
            c.up.put(&out.bytes().unwrap());
        }
        let soon = self.random.chance(3);
        let mut controls = Vec::new();
        self.core().controls(soon, &mut controls);
        c.up.put(&controls);
        let most = self.random.below(3000) as usize;
        c.at_server.feed(&c.up.take(most));
        while let Some(frame) = c.at_server.next().unwrap() {
            match &c.admitted {
                None => {
                    assert_eq!(frame.kind, kind::HELLO);
                    match self.registry.hello(frame.payload, false, self.now) {
                        Ok((welcome, Visitor::Session(client, epoch))) => {
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
                    assert_eq!(step, session::SessionEvent::Going);
                }
            }
        }
        if let Some((client, epoch)) = &c.admitted
            && client.is_current(*epoch)
        {
            let mut half = client.session();
            while let Some(out) = half.next() {
                c.down.put(&out.bytes().unwrap());
            }
            for notice in half.notices(self.random.chance(3)) {
                let (kind, body) = Message::encode(&notice);
                c.down.put(&control(kind, &body.fields));
            }
        }
        let most = self.random.below(3000) as usize;
        c.at_client.feed(&c.down.take(most));
        while let Some(frame) = c.at_client.next().unwrap() {
            let step = self.core().receive(&frame).unwrap();
            match step {
                FrameOutcome::Going | FrameOutcome::Opened(_) => {}
                FrameOutcome::Unfit(error) => panic!("one kind of server: {error}"),
                FrameOutcome::Refused(_) => {
                    // The session is gone: a new one is opened and rebuilt.
                    let mut fresh = Connection::default();
                    let hello = self.core().hello(&login(), true);
                    fresh.up.put(&hello);
                    *c = fresh;
                    return true;
                }
                FrameOutcome::Leave => return false,
            }
        }
        true
    }
}

/// A random program over a handful of small vectors, its reads compared with a local run.
fn run(seed: u64, faults: bool) -> (u64, u64, u64, kiln_remote::client::core::Stats) {
    let mut world = World::new(seed);
    while world.core().info().is_none() {
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
                world.core().write(id, data.clone(), Place::Reuse);
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
                world.core().submit(batch.clone());
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
                world.core().write(index, data.clone(), Place::Reuse);
                local.write(index, data, Place::Reuse);
                world.core().submit(batch.clone());
                local.submit(batch);
                live.push(out);
            }
            _ if !live.is_empty() => {
                let id = live[random.below(live.len() as u64) as usize];
                let (promise, answer) = pending(None);
                world.core().read(id, Some(meta), promise);
                reads.push((answer, local.read(id)));
            }
            _ => {}
        }
        for _ in 0..random.below(12) {
            world.step(faults);
        }
    }
    let (promise, done) = pending(None);
    world.core().sync(promise);
    for step in 0.. {
        world.step(faults && step < 200);
        if done.take().is_some_and(|answer| answer.is_ok()) {
            break;
        }
        assert!(step < 100_000, "seed {seed}: no end; {:?}", world.core());
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
    (world.cuts, world.crashes, world.stored, world.core().stats())
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
    while world.core().info().is_none() {
        world.step(false);
    }
    world.core().stored(Err(std::io::Error::other("no space left")));
    let told = world.core().events();
    assert!(told.iter().any(|e| e.contains("recovery is off") && e.contains("no space left")), "{told:?}");
    assert!(world.core().stats().held.entries == 0 && world.core().info().is_some());
}

#[test]
fn disturbed_runs_give_the_same_bits() {
    let seeds = kiln_env::SEEDS.get().unwrap_or(500);
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

// Two servers that exchange values.

/// A value of one side: freed there when neither the program nor a move needs it any more.
struct Hold {
    id: Id,
    freed: Arc<Mutex<Vec<Id>>>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.freed.lock().unwrap().push(self.id);
    }
}

/// A value on the other side, as its client sees it.
struct There {
    core: Arc<Mutex<Core>>,
    id: Id,
}

impl MoveSource for There {
    fn reach(&self) -> Reach {
        self.core.lock().unwrap().reach()
    }

    fn expose(&self, capability: Capability) {
        self.core.lock().unwrap().expose(self.id, capability, 1, 600_000);
    }

    fn faults(&self) -> Arc<Faults> {
        self.core.lock().unwrap().faults()
    }

    fn recall(&self, capability: Capability) -> Pending<Data> {
        let (promise, answer) = pending(None);
        self.core.lock().unwrap().recall(capability, promise);
        answer
    }
}

/// What a client does when the direct way fails; `tries` as in the real one.
fn pass(target: Arc<Mutex<Core>>, transfer: u64, moved: Arc<Move>, tries: u32) {
    let source = moved.source.clone();
    source.expose(moved.capability);
    source.recall(moved.capability).on_answer(move |answer| match answer {
        Err(error) if recalls_left(&error, tries) > 0 => {
            pass(target, transfer, moved, recalls_left(&error, tries));
        }
        answer => target.lock().unwrap().supply(transfer, answer),
    });
}

/// What is under way between the servers.
#[derive(Default)]
struct Between {
    fetches: Vec<(Arc<Client>, Fetch, u32)>,
    recalls: Vec<(Arc<Client>, u64, Capability, u32)>,
    /// Values that came straight, and those that had to go around.
    straight: u64,
    around: u64,
}

/// How often an exposure is looked for that has not been announced: its message may be on its way.
const LOOKS: u32 = 50;

/// What a capability gives on a server: nothing yet, nothing ever, or the value.
fn look(
    registry: &Registry,
    capability: &Capability,
    by: Option<u64>,
) -> Option<Option<Result<Data, Error>>> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let exposure = registry.moves().find(capability).await?;
        if by.is_some_and(|session| session != exposure.session()) {
            return Some(None);
        }
        tokio::time::timeout(Duration::from_millis(1), exposure.value()).await.ok()
    })
}

impl Between {
    /// Fetches and recalls get on a little.
    fn step(&mut self, worlds: &mut [World; 2], random: &mut Random, faults: bool) {
        for world in worlds.iter_mut() {
            let errands = std::mem::take(&mut world.errands);
            for errand in errands {
                match errand {
                    Errand::Expose(moved) => moved.source.expose(moved.capability),
                    Errand::Pass(transfer, moved) => {
                        self.around += 1;
                        pass(world.core.clone(), transfer, moved, RECALLS);
                    }
                    Errand::Store(_) => unreachable!("done by the side itself"),
                }
            }
            for (client, order) in std::mem::take(&mut world.orders) {
                match order {
                    Order::Announce(capability) => {
                        world.registry.moves().announce(client.number, capability);
                    }
                    Order::Fetch(fetch) => self.fetches.push((client, fetch, 0)),
                    Order::Recall(request, capability) => {
                        self.recalls.push((client, request, capability, 0));
                    }
                }
            }
            let registry = &world.registry;
            registry.moves().expire(|session| registry.is_open(session));
        }
        self.fetches.retain_mut(|(client, fetch, looks)| {
            if client.is_over() {
                return false;
            }
            if !random.chance(3) {
                return true;
            }
            let source = worlds.iter().find(|world| world.registry.incarnation() == fetch.incarnation);
            let lost = |reason: &str| {
                client.session().fetch_lost(fetch.transfer, reason);
                false
            };
            let Some(source) = source else { return lost("its server is another by now") };
            if faults && random.chance(15) {
                return lost("the servers do not reach each other");
            }
            match look(&source.registry, &fetch.capability, None) {
                Some(Some(value)) => {
                    // Some of it may have come when the way breaks.
                    if faults
                        && random.chance(15)
                        && let Ok(data) = &value
                    {
                        client.session().fetch(fetch.transfer, &data.bytes[..8]).unwrap();
                        return lost("it broke off");
                    }
                    client.session().fetch_whole(fetch.transfer, value);
                    source.registry.moves().done(&fetch.capability);
                    self.straight += 1;
                    false
                }
                Some(None) => lost("it is not exposed any more"),
                None => {
                    *looks += 1;
                    *looks < LOOKS || lost("it is not exposed")
                }
            }
        });
        self.recalls.retain_mut(|(client, request, capability, looks)| {
            if client.is_over() {
                return false;
            }
            let Some(home) = worlds.iter().find(|w| w.registry.list().iter().any(|c| Arc::ptr_eq(c, client)))
            else {
                return false;
            };
            let value = match look(&home.registry, capability, Some(client.number)) {
                Some(Some(value)) => value,
                None if *looks < LOOKS => {
                    *looks += 1;
                    return true;
                }
                _ => Err(Error::Peer { message: "it is not exposed".into() }),
            };
            client.session().recalled(*request, value);
            false
        });
    }
}

/// A random program over two servers, its reads compared with a local run. Gives crashes, rebuilt sessions, snapshots,
/// values that came straight and that went around.
fn run_two(seed: u64, faults: bool) -> [u64; 5] {
    let mut worlds = [World::new(seed), World::new(seed ^ 0x7777)];
    let mut between = Between::default();
    let local = Cpu::start();
    let mut random = Random(seed ^ 0x5eed);
    while worlds.iter().any(|world| world.core().info().is_none()) {
        worlds.iter_mut().for_each(|world| world.step(false));
    }
    let meta = Meta::new(kiln_ir::DType::F32, [8]);
    let freed: [Arc<Mutex<Vec<Id>>>; 2] = Default::default();
    let mut live: [Vec<Arc<Hold>>; 2] = Default::default();
    let mut reads: Vec<(Pending<Data>, Pending<Data>)> = Vec::new();
    let ops = ["add", "mul", "sub", "maximum"].map(|name| parse_op(name).unwrap());
    let mut next = 0u64;
    for _ in 0..80 {
        let at = random.below(2) as usize;
        let mut hold = |side: usize| {
            next += 1;
            Arc::new(Hold { id: Id(next), freed: freed[side].clone() })
        };
        match random.below(10) {
            0 | 1 => {
                let content: Vec<u8> = (0..8)
                    .flat_map(|_| ((random.below(2000) as f32 - 1000.0) / 512.0).to_le_bytes())
                    .collect();
                let (data, value) = (Data::new(meta, Bytes::new(content)), hold(at));
                worlds[at].core().write(value.id, data.clone(), Place::Reuse);
                local.write(value.id, data, Place::Reuse);
                live[at].push(value);
            }
            2..=4 if live[at].len() >= 2 => {
                let op: Op = ops[random.below(4) as usize].clone();
                let mut pick = || live[at][random.below(live[at].len() as u64) as usize].id;
                let (a, b, out) = (pick(), pick(), hold(at));
                let batch = Batch {
                    items: vec![Item::Run(Node::new(op, &[a, b], &[out.id]))],
                    urgency: Urgency::Now,
                    ..Batch::default()
                };
                worlds[at].core().submit(batch.clone());
                local.submit(batch);
                live[at].push(out);
            }
            5..=7 if !live[at].is_empty() => {
                // To the other side.
                let (to, from) = (1 - at, live[at][random.below(live[at].len() as u64) as usize].clone());
                let value = hold(to);
                let mut capability = [0; 32];
                capability[..8].copy_from_slice(&random.next().to_le_bytes());
                let source = Arc::new(There { core: worlds[at].core.clone(), id: from.id });
                source.expose(capability);
                local.write(value.id, local.read(from.id).wait().unwrap(), Place::Reuse);
                let (id, place) = (value.id, Place::Reuse);
                let moved = Move { id, meta, place, capability, source, keep: from };
                worlds[to].core().fetch(Arc::new(moved));
                live[to].push(value);
            }
            8 if !live[at].is_empty() => {
                let id = live[at][random.below(live[at].len() as u64) as usize].id;
                let (promise, answer) = pending(None);
                worlds[at].core().read(id, Some(meta), promise);
                reads.push((answer, local.read(id)));
            }
            // Each side has snapshots of its own, at places of its own.
            _ if random.chance(2) => worlds[at].core().snapshot(),
            _ => {}
        }
        for side in 0..2 {
            while live[side].len() > 6 {
                let gone = random.below(live[side].len() as u64) as usize;
                live[side].swap_remove(gone);
            }
            let items: Vec<Item> =
                std::mem::take(&mut *freed[side].lock().unwrap()).into_iter().map(Item::Free).collect();
            worlds[side].core().submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
        }
        if faults && random.chance(25) {
            // Both at once.
            worlds.iter_mut().for_each(World::crash);
        }
        for _ in 0..random.below(12) {
            worlds.iter_mut().for_each(|world| world.step(faults));
            between.step(&mut worlds, &mut random, faults);
        }
    }
    let done: Vec<Pending<()>> = worlds
        .iter()
        .map(|world| {
            let (promise, done) = pending(None);
            world.core().sync(promise);
            done
        })
        .collect();
    let mut ended = [false; 2];
    for step in 0.. {
        worlds.iter_mut().for_each(|world| world.step(faults && step < 200));
        between.step(&mut worlds, &mut random, faults && step < 200);
        for (ended, done) in ended.iter_mut().zip(&done) {
            *ended |= done.take().is_some_and(|answer| answer.is_ok());
        }
        if ended == [true; 2] {
            break;
        }
        assert!(step < 100_000, "seed {seed}: no end; {:?} {:?}", worlds[0].core(), worlds[1].core());
    }
    for (at, (remote, local)) in reads.into_iter().enumerate() {
        let (remote, local) = (remote.take().expect("answered before the sync"), local.wait().unwrap());
        let remote = remote.unwrap_or_else(|e| panic!("seed {seed}: read {at} is {e}"));
        assert!(remote.meta == local.meta && *remote.bytes == *local.bytes, "seed {seed}: read {at} differs");
    }
    let sum = |f: fn(&World) -> u64| worlds.iter().map(f).sum::<u64>();
    [
        sum(|w| w.crashes),
        sum(|w| w.core().stats().replayed),
        sum(|w| w.core().stats().held.snapshots),
        between.straight,
        between.around,
    ]
}

#[test]
fn values_go_straight_between_two_undisturbed_servers() {
    for seed in 0..30 {
        let [crashes, replayed, _, straight, around] = run_two(seed, false);
        assert_eq!((crashes, replayed, around), (0, 0, 0));
        assert!(straight > 0, "seed {seed}");
    }
}

#[test]
fn two_servers_that_are_lost_alone_or_together_give_the_same_bits() {
    let seeds = kiln_env::SEEDS.get().unwrap_or(200);
    let mut sums = [0; 5];
    for seed in 0..seeds {
        let counts = run_two(seed, true);
        sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    let [crashes, replayed, snapshots, straight, around] = sums;
    println!(
        "{seeds} seeds: {crashes} crashes, {replayed} replayed, {snapshots} snapshots, {straight} moved straight, {around} around"
    );
    // The test must have tested something.
    assert!(crashes > seeds && replayed > seeds && snapshots > seeds && straight > seeds && around > seeds);
}
