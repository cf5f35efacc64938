//! Values that go from one server to another: bytes, order, failures, and who may fetch what.

use kiln_cpu::Cpu;
use kiln_device::{Batch, Bytes, Control, Data, Driver, Fetch, Host, Observe, Peer, Place, Urgency};
use kiln_ir::{DType, Id, Item, Meta, Node, text::parse_op};
use kiln_remote::protocol::frame::Decoder;
use kiln_remote::protocol::frame::control;
use kiln_remote::protocol::greeting::{Hello, Purpose, Refusal};
use kiln_remote::protocol::message::{Message, kind};
use kiln_remote::server::moves::{Moves, Shown};
use kiln_remote::server::registry::{Config, Registry};
use kiln_remote::server::session::Quota;
use kiln_remote::server::{Listen, Server};
use kiln_remote::{Address, Remote};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

/// A server in this process; dropping it is like killing it.
struct Running {
    server: Arc<Server>,
    at: SocketAddr,
    kill: Arc<tokio::sync::Notify>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    fn start(moves: Moves) -> Running {
        Running::start_at("127.0.0.1:0".parse().unwrap(), moves)
    }

    fn start_at(at: SocketAddr, moves: Moves) -> Running {
        let registry = Registry::new(Config {
            token: None,
            quota: Quota::default(),
            most_sessions: 64,
            lease: Duration::from_secs(10),
            heartbeat: Duration::from_secs(1),
            offered: vec!["cpu".into()],
            devices: Box::new(|_| Some(Arc::new(Cpu::start()))),
            random: Box::new(|bytes| getrandom::fill(bytes).unwrap()),
        });
        let server = Server::new(registry.with_moves(moves), |_| {});
        let kill = Arc::new(tokio::sync::Notify::new());
        let (send, receive) = mpsc::channel();
        let (served, killed) = (server.clone(), kill.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let listen = Listen { tcp: vec![at], unix: Vec::new(), tls: None };
                // A port that was just left may take a moment.
                let bound = listen.bind().await.unwrap();
                send.send(bound.addresses()[0]).unwrap();
                let forever = std::future::pending();
                tokio::select! {
                    () = served.run(bound, 2, forever, Duration::ZERO) => {}
                    () = killed.notified() => {}
                }
            });
        });
        Running { server, at: receive.recv().unwrap(), kill, thread: Some(thread) }
    }

    fn open(&self) -> Remote {
        self.open_with("")
    }

    fn open_with(&self, options: &str) -> Remote {
        Remote::open(vec![Address::parse(&format!("kiln://{}{options}", self.at)).unwrap()]).unwrap()
    }

    fn exposed(&self) -> usize {
        self.server.registry.moves().count()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill.notify_one();
        self.thread.take().map(|thread| thread.join());
    }
}

/// A server that may fetch from others on this machine.
fn near(advertise: impl Into<String>) -> Moves {
    Moves::new(advertise, vec!["127.0.0.1".into()])
}

fn until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A value whose bytes depend on its number.
fn value(meta: Meta, number: u64) -> Data {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let bool = meta.dtype == DType::Bool;
    let bytes = (0..meta.bytes()).map(|_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if bool { (state >> 40) as u8 & 1 } else { (state >> 40) as u8 }
    });
    Data::new(meta, Bytes::new(bytes.collect::<Vec<u8>>()))
}

fn fetch(to: &Remote, id: u64, meta: Meta, from: &Remote, source: u64) {
    fetch_keeping(to, id, meta, from, source, Arc::new(()));
}

fn fetch_keeping(to: &Remote, id: u64, meta: Meta, source: &Remote, from: u64, keep: Arc<()>) {
    let (id, from, place) = (Id(id), Id(from), Place::Reuse);
    assert!(to.fetch(Fetch { id, meta, place, source, from, keep }));
}

fn same(device: &Remote, id: u64, want: &Data) {
    let got = device.read(Id(id)).wait().unwrap();
    assert!(got.meta == want.meta && *got.bytes == *want.bytes, "v{id} differs: {}", want.meta);
}

#[test]
fn every_dtype_and_size_arrives() {
    let (a, b) = (Running::start(near("")), Running::start(near("")));
    let (from, to, beside) = (a.open(), b.open(), a.open());
    let mut next = 1;
    for dtype in DType::ALL {
        for extent in [0, 256, 1 << 16] {
            let meta = Meta::new(dtype, [extent]);
            let data = value(meta, next);
            from.write(Id(next), data.clone(), Place::Persistent);
            fetch(&to, next, meta, &from, next);
            fetch(&beside, next, meta, &from, next);
            same(&to, next, &data);
            same(&beside, next, &data);
            next += 1;
        }
    }
    for extent in [1, 3, (256 << 10) - 1, (256 << 10) + 1, 5 << 20] {
        let meta = Meta::new(DType::U8, [extent]);
        let data = value(meta, next);
        from.write(Id(next), data.clone(), Place::Reuse);
        fetch(&to, next, meta, &from, next);
        same(&to, next, &data);
        next += 1;
    }
    assert!(from.events().is_empty() && to.events().is_empty(), "{:?}", to.events());
    until("the end of exposures that hold bytes", || a.exposed() <= DType::ALL.len() * 2);
}

#[test]
fn the_client_sees_control_messages_only() {
    let (a, b) = (Running::start(near("")), Running::start(near("")));
    let (from, to, beside) = (a.open(), b.open(), a.open());
    // Computed there, so that not even an upload passes the client.
    let full = parse_op("full shape=[1000000] value=f32:1.5").unwrap();
    let items = vec![Item::Run(Node::new(full, &[], &[Id(1)]))];
    from.submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
    let meta = Meta::new(DType::F32, [1_000_000]);
    fetch(&to, 2, meta, &from, 1);
    fetch(&beside, 3, meta, &from, 1);
    for (device, id) in [(&to, 2), (&beside, 3)] {
        device.sync().wait().unwrap();
        let counts = device.stats().link;
        assert!(counts.received_bytes < 2000 && counts.sent_bytes < 2000, "{counts:?}");
        let got = device.read(Id(id)).wait().unwrap();
        assert!(got.bytes.chunks_exact(4).all(|x| x == 1.5f32.to_le_bytes()));
    }
    let counts = from.stats().link;
    assert!(counts.received_bytes < 2000 && counts.sent_bytes < 2000, "{counts:?}");
    until("the end of all exposures", || a.exposed() == 0);
}

#[test]
fn concurrent_moves_of_two_clients_never_mix() {
    let (a, b) = (Running::start(near("")), Running::start(near("")));
    std::thread::scope(|scope| {
        for client in 0..2u64 {
            let (a, b) = (&a, &b);
            scope.spawn(move || {
                let (left, right) = (a.open(), b.open());
                let metas: Vec<Meta> =
                    (0..100).map(|i| Meta::new(DType::U8, [1000 + 7 * i as usize])).collect();
                // Both clients use the same names.
                for (i, meta) in metas.iter().enumerate() {
                    let (from, to) = if i % 2 == 0 { (&left, &right) } else { (&right, &left) };
                    let data = value(*meta, 1000 * client + i as u64);
                    from.write(Id(i as u64), data, Place::Reuse);
                    fetch(to, 1000 + i as u64, *meta, from, i as u64);
                    let free = vec![Item::Free(Id(i as u64))];
                    from.submit(Batch { items: free, ..Batch::default() });
                }
                for (i, meta) in metas.iter().enumerate() {
                    let to = if i % 2 == 0 { &right } else { &left };
                    same(to, 1000 + i as u64, &value(*meta, 1000 * client + i as u64));
                }
                assert!(left.events().is_empty() && right.events().is_empty(), "{:?}", right.events());
            });
        }
    });
    until("the end of all exposures", || a.exposed() == 0 && b.exposed() == 0);
}

#[test]
fn a_chain_of_moves_waits_for_what_it_needs() {
    let (a, b) = (Running::start(near("")), Running::start(near("")));
    let (left, right) = (a.open(), b.open());
    let meta = Meta::new(DType::F32, [64]);
    left.write(Id(0), Data::new(meta, Bytes::new(1f32.to_le_bytes().repeat(64))), Place::Reuse);
    let double = |device: &Remote, id: u64| {
        let add = Node::new(parse_op("add").unwrap(), &[Id(id), Id(id)], &[Id(id + 1)]);
        device.submit(Batch { items: vec![Item::Run(add)], ..Batch::default() });
    };
    for round in 0..10 {
        let (from, to) = if round % 2 == 0 { (&left, &right) } else { (&right, &left) };
        fetch(to, 2 * round + 2, meta, from, 2 * round + if round == 0 { 0 } else { 1 });
        double(to, 2 * round + 2);
    }
    let end = left.read(Id(21)).wait().unwrap();
    assert!(end.bytes.chunks_exact(4).all(|x| x == 1024f32.to_le_bytes()));
}

#[test]
fn an_unreachable_source_is_gone_around_with_a_warning() {
    let b = Running::start(near(""));
    // The first is on this machine but nobody listens; the second is no allowed peer.
    for (url, reason) in [("kiln://127.0.0.1:1", "gave no value"), ("kiln://192.0.2.7:7717", "--allow-peer")]
    {
        let a = Running::start(near(url));
        let (from, to) = (a.open(), b.open());
        for (next, extent) in [(0, 1), (1, 5 << 20)] {
            let meta = Meta::new(DType::U8, [extent]);
            let data = value(meta, extent as u64);
            from.write(Id(next), data.clone(), Place::Reuse);
            fetch(&to, next, meta, &from, next);
            from.submit(Batch { items: vec![Item::Free(Id(next))], ..Batch::default() });
            same(&to, next, &data);
        }
        let events = to.events();
        let told = |e: &String| e.contains("through the client") && e.contains(reason);
        assert!(events.len() == 2 && events.iter().all(told), "{events:?}");
    }
}

/// Passes connections on to `to()`, and cuts each after so many bytes towards the one who connects. Counts them.
fn cutter(to: impl Fn() -> SocketAddr + Send + 'static, after: u64, count: Arc<AtomicUsize>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            count.fetch_add(1, Ordering::SeqCst);
            let far = TcpStream::connect(to()).unwrap();
            let (mut up, mut down) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut up, &mut &far));
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut (&mut down).take(after), &mut &near);
                let _ = (near.shutdown(Shutdown::Both), down.shutdown(Shutdown::Both));
            });
        }
    });
    at
}

#[test]
fn a_broken_fetch_goes_on_where_it_was() {
    let (there, count) = (Arc::new(OnceLock::new()), Arc::new(AtomicUsize::new(0)));
    let known = there.clone();
    let proxy = cutter(move || *known.wait(), 700_000, count.clone());
    let a = Running::start(near(format!("kiln://{proxy}")));
    there.set(a.at).unwrap();
    let b = Running::start(near(""));
    let (from, to) = (a.open(), b.open());
    let meta = Meta::new(DType::U8, [5 << 20]);
    let data = value(meta, 9);
    from.write(Id(1), data.clone(), Place::Reuse);
    fetch(&to, 2, meta, &from, 1);
    same(&to, 2, &data);
    assert!(to.events().is_empty(), "it did not have to go through the client");
    // Two whole pieces a connection: what came is not fetched again, and all of it was one fetch.
    assert_eq!(count.load(Ordering::SeqCst), 10);
    until("the end of the exposure", || a.exposed() == 0);
}

#[test]
fn a_failed_value_fails_where_it_went() {
    let (a, b) = (Running::start(near("")), Running::start(near("")));
    let (from, to) = (a.open(), b.open());
    let (data, index) = (Meta::new(DType::F32, [3]), Meta::new(DType::I64, [1]));
    from.write(Id(1), value(data, 1), Place::Reuse);
    from.write(Id(2), Data::new(index, Bytes::new(7i64.to_le_bytes().to_vec())), Place::Reuse);
    let gather = Node::new(parse_op("gather axis=0").unwrap(), &[Id(1), Id(2)], &[Id(3)]);
    from.submit(Batch { items: vec![Item::Run(gather)], ..Batch::default() });
    fetch(&to, 4, Meta::new(DType::F32, [1]), &from, 3);
    let error = to.read(Id(4)).wait().unwrap_err();
    assert!(matches!(error.root(), kiln_device::Error::Index { index: 7, length: 3, .. }), "{error:?}");
    // Others are as they were.
    fetch(&to, 5, data, &from, 1);
    same(&to, 5, &value(data, 1));
}

#[test]
fn a_lost_target_fetches_again() {
    let a = Running::start(near(""));
    let mut b = Running::start(near(""));
    let (from, to) = (a.open(), b.open());
    let meta = Meta::new(DType::U8, [3 << 20]);
    let data = value(meta, 5);
    from.write(Id(1), data.clone(), Place::Reuse);
    let kept = Arc::new(());
    fetch_keeping(&to, 2, meta, &from, 1, kept.clone());
    same(&to, 2, &data);
    assert_eq!(Arc::strong_count(&kept), 2, "the source holds the value for another time");
    let at = b.at;
    drop(b);
    b = Running::start_at(at, near(""));
    same(&to, 2, &data);
    assert_eq!(to.stats().replayed, 1);
    // The snapshot after a recovery makes the target independent of the source.
    until("a snapshot", || to.stats().held.snapshots > 0);
    until("the release of the source", || {
        to.sync().wait().unwrap();
        Arc::strong_count(&kept) == 1
    });
    drop(b);
}

#[test]
fn a_source_that_is_lost_before_it_was_fetched_from_is_not_waited_for() {
    let mut a = Running::start(near(""));
    let b = Running::start(near(""));
    let (from, to) = (a.open(), b.open());
    let meta = Meta::new(DType::U8, [1 << 20]);
    let data = value(meta, 5);
    from.write(Id(1), data.clone(), Place::Reuse);
    from.sync().wait().unwrap();
    let at = a.at;
    drop(a);
    // Asked for while there is no source, and answered once there is one again.
    fetch(&to, 2, meta, &from, 1);
    let answer = to.read(Id(2));
    std::thread::sleep(Duration::from_millis(30));
    a = Running::start_at(at, near(""));
    let start = Instant::now();
    let got = answer.wait().unwrap();
    assert!(got.meta == meta && *got.bytes == *data.bytes);
    assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
    drop(a);
}

#[test]
fn a_move_without_recovery_holds_nothing_afterwards() {
    let (a, b) = (Running::start(near("")), Running::start(near("")));
    let (from, to) = (a.open(), b.open_with("?recover=0"));
    let meta = Meta::new(DType::U8, [1 << 20]);
    from.write(Id(1), value(meta, 5), Place::Reuse);
    let kept = Arc::new(());
    fetch_keeping(&to, 2, meta, &from, 1, kept.clone());
    same(&to, 2, &value(meta, 5));
    until("the release of the source", || {
        to.sync().wait().unwrap();
        Arc::strong_count(&kept) == 1
    });
}

/// Host memory that says when it is gone.
struct Counted(Vec<u8>, Arc<AtomicUsize>);

// SAFETY: a vector that is only shared neither moves nor changes.
unsafe impl Host for Counted {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

/// Asks a server for a capability, as another server would; gives what comes first.
fn ask(at: SocketAddr, capability: [u8; 32], transfer: u64) -> (TcpStream, Vec<u8>) {
    let mut stream = TcpStream::connect(at).unwrap();
    let hello = Hello {
        versions: kiln_remote::protocol::VERSIONS,
        token: Vec::new(),
        purpose: Purpose::Fetch { capability, transfer, from: 0 },
        compress: false,
        program: String::new(),
        table: Vec::new(),
    };
    stream.write_all(&control(kind::HELLO, &hello.encode())).unwrap();
    let (mut kinds, mut decoder) = (Vec::new(), Decoder::default());
    loop {
        while let Some(frame) = decoder.next().unwrap() {
            kinds.push(frame.kind);
            match frame.kind {
                kind::REFUSED => assert_eq!(Refusal::decode(frame.payload), Ok(Refusal::Capability)),
                kind::VALUE => {
                    let mut scratch = Vec::new();
                    assert!(matches!(
                        Message::decode(frame.kind, frame.payload, &mut scratch),
                        Ok(Message::Value { .. })
                    ));
                }
                _ => {}
            }
        }
        if kinds.iter().any(|k| [kind::REFUSED, kind::VALUE].contains(k)) {
            break;
        }
        match stream.read(decoder.spare(64)).unwrap() {
            0 => break,
            n => decoder.filled(n),
        }
    }
    (stream, kinds)
}

#[test]
fn a_dead_receiver_frees_the_source_by_the_deadline() {
    let a = Running::start(near(""));
    let client = a.open();
    client.sync().wait().unwrap();
    let session = a.server.registry.list()[0].number;
    let gone = Arc::new(AtomicUsize::new(0));
    let expose = |capability: [u8; 32]| {
        // More than sockets hold.
        let bytes = Bytes::new(Counted(vec![7; 64 << 20], gone.clone()));
        let value = Ok(Data::new(Meta::new(DType::U8, [64 << 20]), bytes));
        let patience = Duration::from_millis(500);
        a.server.registry.moves().expose(session, Shown { capability, fetches: 1, patience, value });
    };
    expose([1; 32]);
    expose([2; 32]);
    expose([3; 32]);
    // One never comes, one begins and dies, one begins and falls silent.
    drop(ask(a.at, [2; 32], 1));
    let (silent, kinds) = ask(a.at, [3; 32], 1);
    assert_eq!(kinds.last(), Some(&kind::VALUE));
    assert_eq!(gone.load(Ordering::SeqCst), 0);
    let start = Instant::now();
    until("the release", || gone.load(Ordering::SeqCst) == 3);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    drop(silent);
}

#[test]
fn only_the_capability_opens_a_value() {
    let a = Running::start(near(""));
    let client = a.open();
    client.sync().wait().unwrap();
    let session = a.server.registry.list()[0].number;
    let expose = |capability: [u8; 32], milliseconds: u64| {
        let value = Ok(Data::new(Meta::new(DType::U8, [3]), Bytes::new(vec![1u8, 2, 3])));
        let patience = Duration::from_millis(milliseconds);
        a.server.registry.moves().expose(session, Shown { capability, fetches: 1, patience, value });
    };
    expose([1; 32], 20_000);
    expose([2; 32], 1);
    std::thread::sleep(Duration::from_millis(250));
    for wrong in [[9; 32], [2; 32], [0; 32]] {
        assert_eq!(ask(a.at, wrong, 1).1, [kind::WELCOME, kind::REFUSED]);
    }
    // A broken fetch may ask again; another may not.
    assert_eq!(ask(a.at, [1; 32], 1).1[..2], [kind::WELCOME, kind::VALUE]);
    assert_eq!(ask(a.at, [1; 32], 1).1[..2], [kind::WELCOME, kind::VALUE]);
    assert_eq!(ask(a.at, [1; 32], 2).1, [kind::WELCOME, kind::REFUSED]);
    // What a session exposes ends with it.
    client.close();
    until("the end of the session", || a.exposed() == 0);
    assert_eq!(ask(a.at, [1; 32], 1).1, [kind::WELCOME, kind::REFUSED]);
}

#[test]
fn a_closed_device_ends_its_session_at_once() {
    let a = Running::start(near(""));
    let client = a.open();
    client.write(Id(1), value(Meta::new(DType::U8, [9]), 1), Place::Reuse);
    client.sync().wait().unwrap();
    assert_eq!(a.server.registry.list().len(), 1);
    let start = Instant::now();
    client.close();
    assert!(start.elapsed() < Duration::from_millis(400), "{:?}", start.elapsed());
    until("the end of the session", || a.server.registry.list().is_empty());
    assert!(start.elapsed() < Duration::from_secs(2), "the lease was waited for");
    let error = client.read(Id(1)).wait().unwrap_err();
    assert!(error.to_string().ends_with("was closed"), "{error}");
    assert_eq!(client.ended(), Some(error));
    client.close();
}

#[test]
fn servers_that_are_lost_together_are_rebuilt_from_snapshots_at_different_places() {
    const STEPS: u64 = 8;
    // Where each side takes a snapshot, if it does.
    for cuts in [[None, None], [Some(2), Some(6)], [Some(6), Some(2)], [Some(4), None], [None, Some(4)]] {
        let (a, b) = (Running::start(near("")), Running::start(near("")));
        let (left, right) = (a.open(), b.open());
        let meta = Meta::new(DType::I64, [100]);
        let (mut want, by) = (value(meta, 1), value(meta, 2));
        let plus = |x: &Data| {
            let long = |c: &[u8]| i64::from_le_bytes(c.try_into().unwrap());
            let sums = x.bytes.chunks(8).zip(by.bytes.chunks(8)).map(|(x, y)| long(x).wrapping_add(long(y)));
            Data::new(meta, Bytes::new(sums.flat_map(i64::to_le_bytes).collect::<Vec<u8>>()))
        };
        left.write(Id(1), want.clone(), Place::Reuse);
        left.write(Id(2), by.clone(), Place::Reuse);
        right.write(Id(3), by.clone(), Place::Reuse);
        let add = |device: &Remote, x: u64, y: u64, out: u64| {
            let node = Node::new(parse_op("add").unwrap(), &[Id(x), Id(y)], &[Id(out)]);
            let items = vec![Item::Run(node)];
            device.submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
        };
        let mut last = 1;
        // A value goes to and fro, and each side changes it.
        for step in 1..=STEPS {
            let id = 10 * step;
            add(&left, last, 2, id);
            fetch(&right, id + 1, meta, &left, id);
            add(&right, id + 1, 3, id + 2);
            fetch(&left, id + 3, meta, &right, id + 2);
            last = id + 3;
            want = plus(&plus(&want));
            for (device, cut) in [&left, &right].into_iter().zip(cuts) {
                if cut == Some(step) {
                    device.snapshot();
                    until("a snapshot", || device.stats().held.snapshots > 0);
                }
            }
        }
        let places = (a.at, b.at);
        drop((a, b));
        let (a, b) = (Running::start_at(places.0, near("")), Running::start_at(places.1, near("")));
        same(&left, last, &want);
        same(&right, last - 1, &want);
        assert_eq!((left.stats().replayed, right.stats().replayed), (1, 1), "{cuts:?}");
        drop((a, b));
    }
}
