//! Clients that do not behave, and programs that go wrong: typed answers, bounded memory, and others live on.

use kiln::Tensor;
use kiln_chaos::program::{handle, stream, train};
use kiln_chaos::{Options, Raw, Serving, hello, open};
use kiln_cpu::Cpu;
use kiln_device::{Batch, Bytes, Data, Driver, Error, Place, Urgency};
use kiln_ir::custom::{CustomOp, register};
use kiln_ir::text::parse_op;
use kiln_ir::{CustomCall, DType, Id, Item, Meta, Node, Op, OpError};
use kiln_remote::protocol::frame;
use kiln_remote::protocol::greeting::{Purpose, Refusal};
use kiln_remote::protocol::message::{Message, kind};
use kiln_remote::server::session::Quota;
use smallvec::{SmallVec, smallvec};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(5);

fn server() -> Serving {
    Serving::start(Options::default())
}

/// The server still does its work for others.
fn lives(server: &Serving) {
    let remote = open(&server.url(), PATIENCE).unwrap();
    assert_eq!(stream(&*remote, 5, 30), stream(&Cpu::start(), 5, 30));
}

fn node(op: &str, ins: &[u64], out: u64) -> Item {
    let ins: Vec<Id> = ins.iter().copied().map(Id).collect();
    Item::Run(Node::new(parse_op(op).unwrap(), &ins, &[Id(out)]))
}

fn submit(device: &dyn Driver, items: Vec<Item>) {
    device.submit(Batch { items, urgency: Urgency::Now, ..Batch::default() });
}

fn number(device: &dyn Driver, id: u64) {
    let data = Data::new(Meta::new(DType::F32, [2]), Bytes::new(vec![0u8; 8]));
    device.write(Id(id), data, Place::Reuse);
}

#[test]
fn versions_that_do_not_meet_are_refused_with_those_that_would() {
    let server = server();
    for (versions, fits) in
        [((0, 0), None), ((4, 9), None), ((u64::MAX, u64::MAX), None), ((1, 9), Some(3)), ((0, 1), Some(1))]
    {
        let mut greeting = hello(b"", Purpose::Open { device: String::new() });
        greeting.versions = versions;
        let answer = Raw::connect(server.address()).greet(&greeting);
        match fits {
            Some(version) => assert_eq!(answer.unwrap().version, version),
            None => assert_eq!(answer.unwrap_err(), Refusal::Version(1, 3), "{versions:?}"),
        }
    }
    lives(&server);
}

#[test]
fn a_wrong_token_is_refused_slowly_and_never_logged() {
    let secret = b"the-right-token".to_vec();
    let server = Serving::start(Options { token: Some(secret.clone()), ..Options::default() });
    let (long, longer) = (vec![b'x'; 100 << 10], vec![b'x'; 300 << 10]);
    for token in [&b"wrong-token"[..], b"", b"the-right-toke", b"the-right-token2", &long] {
        let answer = Raw::connect(server.address()).greet(&hello(token, Purpose::Watch));
        assert_eq!(answer.unwrap_err(), Refusal::Token);
    }
    // Too long to be heard at all.
    assert!(Raw::connect(server.address()).greet(&hello(&longer, Purpose::Watch)).is_err());
    // Whoever guesses much is heard once in 200 ms, however many connections it has.
    let start = Instant::now();
    let guesses: Vec<_> = (0..16)
        .map(|i| {
            let address = server.address();
            std::thread::spawn(move || {
                let guess = format!("guess-{i}");
                let mut raw = Raw::connect(address);
                raw.stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                raw.greet(&hello(guess.as_bytes(), Purpose::Watch)).unwrap_err()
            })
        })
        .collect();
    guesses.into_iter().for_each(|g| assert_eq!(g.join().unwrap(), Refusal::Token));
    let more: Vec<_> = (0..8)
        .map(|_| {
            let address = server.address();
            std::thread::spawn(move || Raw::connect(address).greet(&hello(b"more", Purpose::Watch)))
        })
        .collect();
    more.into_iter().for_each(|g| assert!(g.join().unwrap().is_err()));
    assert!(start.elapsed() > Duration::from_millis(1600), "{:?}", start.elapsed());
    // And the right one still gets in.
    assert!(Raw::connect(server.address()).greet(&hello(&secret, Purpose::Watch)).is_ok());
    let log = server.log().join("\n");
    for secret in ["token2", "guess", "wrong-token", "xxxx", "the-right"] {
        assert!(!log.contains(secret), "{log}");
    }
    assert!(log.contains("the token is wrong"), "{log}");
}

#[test]
fn strangers_who_say_nothing_do_not_keep_others_out() {
    let server = server();
    let silent: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    let start = Instant::now();
    lives(&server);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    // A hello that comes byte by byte is not waited for either.
    let mut slow = TcpStream::connect(server.address()).unwrap();
    slow.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    slow.write_all(&[9]).unwrap();
    let mut end = [0; 1];
    assert_eq!(slow.read(&mut end).unwrap_or(0), 0, "it was closed");
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    drop(silent);
}

#[test]
fn frames_without_an_end_or_a_sense_end_the_connection() {
    let server = server();
    for len in [frame::MOST as u32 + 1, 1 << 31, u32::MAX] {
        let mut raw = Raw::connect(server.address());
        raw.bytes(&len.to_le_bytes());
        raw.bytes(&[0; 13]);
        assert!(raw.frame().is_none(), "a hello of {len} bytes");
        let (mut raw, _) = Raw::open(server.address());
        raw.bytes(&len.to_le_bytes());
        raw.bytes(&[0; 13]);
        assert!(raw.frame().is_none(), "a frame of {len} bytes");
    }
    // A frame that never ends holds its megabyte and nothing else.
    let (mut raw, _) = Raw::open(server.address());
    raw.bytes(&(frame::MOST as u32).to_le_bytes());
    raw.bytes(&vec![0; frame::MOST / 2]);
    let mut noise = Raw::connect(server.address());
    noise.bytes(&[0xff; 4096]);
    assert!(noise.frame().is_none());
    let mut early = Raw::connect(server.address());
    early.send(&Message::Sync { request: 1 });
    assert!(early.frame().is_none(), "no hello, no session");
    lives(&server);
}

#[test]
fn a_client_that_does_not_read_is_waited_for_and_bounded() {
    let server = server();
    let (mut raw, _) = Raw::open(server.address());
    let meta = Meta::new(DType::U8, [1 << 20]);
    raw.send(&Message::Upload { transfer: 1, id: Id(1), meta, place: Place::Reuse });
    let piece = vec![7u8; 256 << 10];
    (0..4).for_each(|_| assert!(raw.send(&Message::Piece { of: 1, bytes: &piece })));
    // Five gigabytes of answers.
    for request in 0..5000 {
        assert!(raw.send(&Message::Read { request, id: Id(1), background: false }));
    }
    std::thread::sleep(Duration::from_millis(500));
    let client = server.server.registry.list().into_iter().find(|c| c.program == "raw").unwrap();
    let (queue, executed, _) = client.session().load();
    assert!(executed < 200 && queue > 4000, "{executed} executed, {queue} wait");
    lives(&server);
}

#[test]
fn a_browser_gets_a_page() {
    let server = server();
    let get = |request: &str| {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(format!("{request} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    lives(&server);
    assert!(get("GET /").starts_with("HTTP/1.1 200") && get("GET /").contains("Device::open"));
    assert!(get("GET /healthz").ends_with("ok\n"));
    assert!(get("GET /metrics").contains("kiln_sessions_opened_total 1\n"));
    assert!(get("GET /../../etc/passwd").starts_with("HTTP/1.1 404"));
    assert!(get("HEAD /").ends_with("\r\n\r\n"));
    let mut long = TcpStream::connect(server.address()).unwrap();
    let _ = long.write_all(&[&b"GET /"[..], &vec![b'a'; 64 << 10]].concat());
    let mut answer = Vec::new();
    let _ = long.read_to_end(&mut answer);
    assert!(answer.is_empty(), "a request without an end");
    lives(&server);
}

#[test]
fn every_way_to_connect_gives_the_same_bits() {
    let folder = std::env::temp_dir().join(format!("kiln-chaos-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let socket = folder.join("socket");
    let server = Serving::start(Options { unix: Some(socket.clone()), ..Options::default() });
    let want = train(Arc::new(Cpu::start()), 6).unwrap();
    let tcp = server.url();
    for url in [
        tcp.clone(),
        tcp.replace("kiln://", "ws://"),
        format!("unix:{}", socket.display()),
        format!("{tcp}?compress"),
        format!("{tcp}?recover=0"),
    ] {
        assert_eq!(train(open(&url, PATIENCE).unwrap(), 6).unwrap(), want, "{url}");
    }
    let _ = std::fs::remove_dir_all(&folder);
}

#[test]
fn ids_that_are_unknown_freed_or_foreign_are_typed_errors() {
    let server = server();
    let (mine, theirs) = (open(&server.url(), PATIENCE).unwrap(), open(&server.url(), PATIENCE).unwrap());
    number(&*theirs, 77);
    theirs.sync().wait().unwrap();
    number(&*mine, 1);
    submit(
        &*mine,
        vec![node("neg", &[77], 2), node("exp", &[2], 3), node("neg", &[1], 4), Item::Free(Id(1))],
    );
    submit(&*mine, vec![node("neg", &[1], 5), Item::Free(Id(1)), Item::Free(Id(4711))]);
    assert_eq!(mine.read(Id(77)).wait().unwrap_err(), Error::UnknownValue(Id(77)));
    for (id, unknown) in [(2, 77), (3, 77), (5, 1)] {
        let error = mine.read(Id(id)).wait().unwrap_err();
        assert!(matches!(&error, Error::Failed { op, .. } if op == "neg"), "{error}");
        assert_eq!(error.root(), &Error::UnknownValue(Id(unknown)));
    }
    assert_eq!(&*mine.read(Id(4)).wait().unwrap().bytes, [0, 0, 0, 128, 0, 0, 0, 128]);
    // A name that is in use cannot be taken: the session ends, with the reason, and no other.
    number(&*mine, 4);
    let error = mine.sync().wait().unwrap_err();
    assert!(matches!(&error, Error::Refused { reason, .. } if reason.contains("used before")), "{error}");
    assert!(theirs.read(Id(77)).wait().is_ok());
}

#[test]
fn a_name_that_is_used_again_ends_the_session_and_no_other() {
    let server = server();
    let ended = |batches: Vec<Vec<Item>>, why: &str| {
        let device = open(&server.url(), PATIENCE).unwrap();
        number(&*device, 1);
        batches.into_iter().for_each(|items| submit(&*device, items));
        let error = device.sync().wait().unwrap_err();
        assert!(matches!(&error, Error::Refused { reason, .. } if reason.contains(why)), "{error}");
    };
    let (twice, free) = (node("lt", &[1, 1], 10), Item::Free(Id(10)));
    let first = vec![node("neg", &[1], 10), node("exp", &[10], 11)];
    // Ended before, in the same batch or an earlier one; or still there.
    ended(vec![[&first[..], &[free.clone(), twice.clone()]].concat()], "used before");
    ended(vec![first.clone(), vec![free.clone()], vec![twice.clone()]], "used before");
    ended(vec![[&first[..], &[twice]].concat()], "used before");
    for id in [Id::LOWERED.first.0, Id::RECOMPUTED.first.0, Id::NONE.0] {
        ended(vec![vec![node("neg", &[1], id)]], "only the server's device");
    }
    // Names of several lanes come mixed, in blocks, and each is new.
    let device = open(&server.url(), PATIENCE).unwrap();
    for round in 0..20 {
        for lane in [3 << 16, 1 << 16, 0] {
            let id = lane + round;
            number(&*device, id);
            submit(&*device, vec![node("neg", &[id], id + 1000), Item::Free(Id(id))]);
        }
    }
    assert_eq!(&*device.read(Id(1019)).wait().unwrap().bytes, [0, 0, 0, 128, 0, 0, 0, 128]);
    lives(&server);
}

#[test]
fn operations_that_make_no_sense_fail_as_they_do_locally() {
    let f32s = |shape: &[usize]| Meta::new(DType::F32, shape);
    let cases: &[(&str, &[Meta])] = &[
        ("reshape shape=[3,3]", &[f32s(&[2, 2])]),
        ("reshape shape=[]", &[f32s(&[0])]),
        ("expand shape=[1048576,1048576,1048576]", &[f32s(&[1, 1, 1])]),
        ("expand shape=[4611686018427387904,4]", &[f32s(&[1, 1])]),
        ("full shape=[1099511627776,1099511627776] value=f32:1.0", &[]),
        ("iota shape=[9223372036854775807,3] dtype=i64 axis=0", &[]),
        ("iota shape=[3] dtype=i64 axis=7", &[]),
        ("sum axes=[5] keep=false", &[f32s(&[2, 3])]),
        ("sum axes=[0,0] keep=false", &[f32s(&[2, 3])]),
        ("sum axes=[0] keep=false", &[f32s(&[])]),
        ("max axes=[0] keep=false", &[f32s(&[0, 3])]),
        ("permute order=[0,0]", &[f32s(&[2, 3])]),
        ("permute order=[0]", &[f32s(&[2, 3])]),
        ("slice axis=0 start=5 end=2 step=1", &[f32s(&[6])]),
        ("slice axis=0 start=0 end=9 step=1", &[f32s(&[6])]),
        ("slice axis=0 start=0 end=6 step=0", &[f32s(&[6])]),
        ("dot transpose=false", &[f32s(&[2, 3]), f32s(&[2, 3])]),
        ("dot transpose=false", &[f32s(&[3]), f32s(&[])]),
        ("add", &[f32s(&[2]), Meta::new(DType::I32, [2])]),
        ("add", &[f32s(&[2]), f32s(&[3])]),
        ("add", &[f32s(&[2])]),
        ("neg", &[f32s(&[2]), f32s(&[2])]),
        ("neg", &[]),
        ("neg", &[Meta::new(DType::Bool, [2])]),
        ("select", &[f32s(&[2]), f32s(&[2]), f32s(&[2])]),
        ("cast dtype=q8", &[f32s(&[3])]),
        ("cat axis=3", &[f32s(&[2]), f32s(&[2])]),
        ("take axis=0", &[f32s(&[2]), f32s(&[2])]),
        ("full shape=[2] value=f32:nan", &[]),
        ("sum axes=[] keep=false", &[f32s(&[])]),
        ("neg", &[f32s(&[0, 4])]),
    ];
    let server = server();
    let remote = open(&server.url(), PATIENCE).unwrap();
    let local = Cpu::start();
    let mut failed = 0;
    for (i, (op, metas)) in cases.iter().enumerate() {
        let outcome = |device: &dyn Driver| {
            let first = 100 * (i as u64 + 1);
            let ins: Vec<u64> = (0..metas.len() as u64).map(|n| first + n).collect();
            for (id, meta) in ins.iter().zip(*metas) {
                device.write(Id(*id), Data::new(*meta, Bytes::new(vec![0u8; meta.bytes()])), Place::Reuse);
            }
            submit(
                device,
                vec![node(op, &ins, first + 50), node("reshape shape=[7]", &[first + 50], first + 51)],
            );
            let read = |id: u64| device.read(Id(id)).wait().map(|data| (data.meta, data.bytes.to_vec()));
            // What travels in words has a colon after the operation's name.
            [first + 50, first + 51]
                .map(|id| read(id).map_err(|e| e.root().to_string().replacen(": ", " ", 1)))
        };
        let (there, here) = (outcome(&*remote), outcome(&local));
        assert_eq!(there, here, "{op} of {metas:?}");
        failed += here[0].is_err() as usize;
    }
    assert!(failed >= 20 && failed < cases.len(), "{failed} have no result");
    lives(&server);
}

#[test]
fn more_than_the_quota_is_out_of_memory_and_others_live_on() {
    let quota = Quota { bytes: 1 << 20, ..Quota::default() };
    let server = Serving::start(Options { quota, ..Options::default() });
    let remote = open(&server.url(), PATIENCE).unwrap();
    let device = handle(remote.clone());
    let fits = Tensor::ones([1000], &device);
    let uploaded = Tensor::from_vec(vec![1f32; 1 << 20], [1 << 20], &device);
    let computed = Tensor::ones([1 << 20], &device) + 1.0;
    for failed in [uploaded, computed] {
        let error = failed.to_data().unwrap_err();
        match error.root() {
            Error::OutOfMemory { asked, limit, .. } => assert!(*asked >= 4 << 20 && *limit == 1 << 20),
            other => panic!("{other}"),
        }
    }
    // A size that no machine has is an error of the same kind.
    let (server_side, bomb) = (&server, Meta::new(DType::F32, [1 << 20, 1 << 20, 1 << 5]));
    let (mut raw, _) = Raw::open(server_side.address());
    raw.send(&Message::Upload { transfer: 1, id: Id(1), meta: bomb, place: Place::Reuse });
    let (kind, payload) = raw.answer().unwrap();
    let Ok(Message::Fault { value: Id(1), error }) = Message::decode(kind, &payload, &mut Vec::new()) else {
        panic!("kind {kind}")
    };
    assert!(matches!(error.root(), Error::OutOfMemory { .. }), "{error}");
    assert_eq!(fits.sum(()).item::<f32>().unwrap(), 1000.0);
    lives(&server);
}

#[test]
fn a_size_that_no_machine_has_is_refused_without_a_quota_too() {
    let server = server();
    for shape in [[1usize << 20, 1 << 20, 1 << 18], [1 << 20, 1 << 20, 1 << 5]] {
        let (mut raw, _) = Raw::open(server.address());
        raw.send(&Message::Upload {
            transfer: 1,
            id: Id(1),
            meta: Meta::new(DType::F32, shape),
            place: Place::Reuse,
        });
        raw.send(&Message::Sync { request: 1 });
        // It is refused, or it waits for bytes that never come; in neither case is there a cost for others.
        raw.stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let _ = raw.answer();
        lives(&server);
    }
}

struct Panics;

impl CustomOp for Panics {
    fn name(&self) -> &str {
        "chaos.panics"
    }

    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        Ok(smallvec![ins[0]])
    }

    fn eval(&self, _: &[u8], ins: &[(Meta, &[u8])], _: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        panic!("on purpose, with {} operands", ins.len())
    }
}

#[test]
fn a_panicking_kernel_poisons_its_results_and_the_line_is_told() {
    register(Panics).unwrap();
    let server = server();
    let remote = open(&server.url(), PATIENCE).unwrap();
    let device = handle(remote.clone());
    let x = Tensor::ones([4], &device);
    let call = CustomCall { name: "chaos.panics".into(), attrs: Vec::new() };
    let line = line!() + 1;
    let y = Tensor::apply(Op::Custom(Arc::new(call)), &[&x]).swap_remove(0);
    let z = y.exp();
    let fine = &x + 1.0;
    // Streamed operations tell their failure without being asked for a value.
    let told = device.sync().unwrap_err();
    device.sync().expect("told once");
    for error in [told, y.to_data().unwrap_err(), z.to_data().unwrap_err()] {
        let Error::Failed { op, origin: Some(origin), cause, .. } = &error else { panic!("{error:?}") };
        assert_eq!(op, "chaos.panics");
        let text = origin.to_string();
        assert!(text.contains(&format!("hostile.rs:{line}")), "{text}");
        let panicked =
            Error::Panicked { op: "chaos.panics".into(), message: "on purpose, with 1 operands".into() };
        assert_eq!(**cause, panicked);
    }
    assert_eq!(fine.to_vec::<f32>().unwrap(), [2.0; 4]);
    lives(&server);
}

#[test]
fn a_session_full_of_tensors_is_gone_with_its_lease() {
    let lease = Duration::from_millis(300);
    let server = Serving::start(Options { lease, ..Options::default() });
    let (mut raw, _) = Raw::open(server.address());
    let meta = Meta::new(DType::U8, [1 << 20]);
    raw.send(&Message::Upload { transfer: 1, id: Id(1), meta, place: Place::Reuse });
    let piece = vec![7u8; 1 << 19];
    (0..2).for_each(|_| assert!(raw.send(&Message::Piece { of: 1, bytes: &piece })));
    raw.send(&Message::Sync { request: 1 });
    assert_eq!(raw.answer().unwrap().0, kind::DONE);
    let device = server.server.registry.list()[0].executor().device().clone();
    assert!(device.memory().live_bytes >= 1 << 20);
    let weak = Arc::downgrade(&device);
    drop(device);
    let start = Instant::now();
    drop(raw);
    assert!(server.until(Duration::from_secs(3), |s| s.sessions() == 0 && weak.strong_count() == 0));
    let took = start.elapsed();
    assert!(took >= lease && took < lease + Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_drain_answers_what_was_sent_and_takes_nobody_new() {
    let server = server();
    let remote = open(&server.url(), Duration::from_secs(1)).unwrap();
    number(&*remote, 1);
    for i in 0..200 {
        submit(&*remote, vec![node("exp", &[1 + i], 2 + i)]);
    }
    let answer = remote.read(Id(201));
    let (address, url, inner) = (server.address(), server.url(), server.server.clone());
    let begun = |s: &Serving| s.server.registry.list().iter().any(|c| c.session().load().1 > 10);
    assert!(server.until(PATIENCE, begun));
    let start = Instant::now();
    let drained = std::thread::spawn(move || server.drain());
    answer.wait().unwrap();
    while !inner.registry.is_draining() {
        std::thread::yield_now();
    }
    // Until it is gone it says why it takes nobody.
    if !drained.is_finished()
        && let Ok(stream) = TcpStream::connect(address)
    {
        drop(stream);
        match open(&url, PATIENCE) {
            Err(Error::Disconnected { reason, .. }) => println!("{reason}"),
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("a session on a draining server"),
        }
    }
    drained.join().unwrap();
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    // Nobody comes back: the device fails within its patience, with a reason.
    let error = remote.sync().wait().unwrap_err();
    assert!(matches!(error, Error::Disconnected { .. }), "{error}");
}

#[test]
fn a_drain_sends_clients_to_the_next_server() {
    let (first, second) = (server(), server());
    let remote = open(&format!("{},{}", first.url(), second.url()), PATIENCE).unwrap();
    let device = handle(remote.clone());
    let x = Tensor::ones([3], &device).exp();
    device.sync().unwrap();
    let start = Instant::now();
    let drained = std::thread::spawn(move || first.drain());
    while second.sessions() == 0 && start.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(x.to_vec::<f32>().unwrap(), [std::f32::consts::E; 3]);
    assert_eq!((second.sessions(), remote.stats().replayed), (1, 1));
    drained.join().unwrap();
}
