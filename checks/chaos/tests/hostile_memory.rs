//! Clients with a token that make the server hold as much as they can: all of it is counted and bounded.

use kiln_chaos::program::stream;
use kiln_chaos::{Options, Raw, Serving, open};
use kiln_cpu::Cpu;
use kiln_device::{Error, Place};
use kiln_ir::custom::{CustomOp, register};
use kiln_ir::{CustomCall, DType, Id, Item, Meta, Node, Op, OpError};
use kiln_remote::protocol::message::{Message, kind};
use kiln_remote::server::registry::Client;
use kiln_remote::server::session::Quota;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);
/// What answers that wait may take besides values, and some for one task's.
const OWN: u64 = 12 << 20;

fn server(bytes: usize) -> Serving {
    let quota = Quota { bytes, ..Quota::default() };
    Serving::start(Options { quota, heartbeat: Duration::from_secs(10), ..Options::default() })
}

fn lives(server: &Serving) {
    let remote = open(&server.url(), PATIENCE).unwrap();
    assert_eq!(stream(&*remote, 5, 30), stream(&Cpu::start(), 5, 30));
}

fn raw(server: &Serving) -> (Raw, Arc<Client>) {
    let (raw, welcome) = Raw::open(server.address());
    raw.stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let client = server.server.registry.list().into_iter().find(|c| c.number == welcome.session);
    (raw, client.unwrap())
}

/// Uploads this many bytes as a value of this number.
fn upload(raw: &mut Raw, id: u64, bytes: usize) {
    let meta = Meta::new(DType::U8, [bytes]);
    raw.send(&Message::Upload { transfer: id, id: Id(id), meta, place: Place::Reuse });
    let piece = vec![7u8; 256 << 10];
    for at in (0..bytes).step_by(piece.len()) {
        raw.send(&Message::Piece { of: id, bytes: &piece[..piece.len().min(bytes - at)] });
    }
}

#[test]
fn answers_to_recalls_are_cut_when_they_go_and_wait_for_room() {
    let server = server(64 << 20);
    let (mut raw, client) = raw(&server);
    upload(&mut raw, 1, 4 << 20);
    let (capability, milliseconds) = ([3; 32], 3_600_000);
    raw.send(&Message::Expose { id: Id(1), capability, fetches: u64::MAX, milliseconds });
    let most = 30_000;
    for request in 0..most {
        assert!(raw.send(&Message::Recall { request, capability }));
    }
    // Until the server has taken all of it in.
    let last = |_: &Serving| client.session().counts().received_frames > most;
    assert!(server.until(PATIENCE, last));
    std::thread::sleep(Duration::from_millis(300));
    let (_, own) = client.session().held();
    assert!(own < OWN, "{own} bytes for answers that nobody reads");
    lives(&server);
    // Who reads gets them all the same: two of them are a window.
    let mut values = 0;
    while values < 2 {
        values += u64::from(raw.answer().unwrap().0 == kind::VALUE);
    }
}

#[test]
fn small_answers_that_nobody_reads_take_little() {
    let server = server(64 << 20);
    let (mut raw, client) = raw(&server);
    upload(&mut raw, 1, 4);
    let mut sent = 0;
    // More than a window of questions is no client's right; this is less.
    for request in 0..300_000 {
        sent += u64::from(raw.send(&Message::Read { request, id: Id(1), background: false }));
    }
    let last = |_: &Serving| client.session().counts().received_frames > sent || client.is_over();
    assert!(server.until(PATIENCE, last));
    std::thread::sleep(Duration::from_millis(300));
    let (_, own) = client.session().held();
    assert!(own < OWN && own > 1 << 20, "{own} bytes");
    lives(&server);
}

#[test]
fn texts_of_errors_are_short_and_counted() {
    let server = server(4 << 20);
    let (mut raw, client) = raw(&server);
    let message = "long ".repeat(10_000);
    let mut sent = 0;
    for id in 1..4000 {
        let error = Error::Peer { message: message.clone() };
        raw.send(&Message::Poison { id: Id(id), error });
        // Within its window.
        if id % 50 == 0 {
            raw.send(&Message::Sync { request: id });
            if raw.answer().is_none_or(|(answer, _)| answer != kind::DONE) {
                break;
            }
        }
        sent += 1;
    }
    assert!(client.reason().is_some_and(|reason| reason.contains("quota")), "{:?}", client.reason());
    assert!(sent > 100, "short ones are no misuse: {sent}");
    let message = |error: &Error| error.to_string().len();
    let mut w = kiln_ir::wire::Writer::default();
    kiln_remote::protocol::fault::encode(&Error::Peer { message: "x".repeat(1 << 19) }, &mut w);
    let cut = kiln_remote::protocol::fault::decode(&mut kiln_ir::wire::Reader::new(&w.bytes)).unwrap();
    assert!(message(&cut) <= 8 << 10);
    lives(&server);
}

#[test]
fn many_small_values_count_as_what_they_take() {
    let server = server(4 << 20);
    let (mut raw, client) = raw(&server);
    let full = || kiln_ir::text::parse_op("full shape=[] value=f32:1.0").unwrap();
    let mut next = 1;
    for template in 0..64 {
        let items: Vec<Item> =
            (0..4096).map(|i| Item::Run(Node::new(full(), &[], &[Id(next + i)]))).collect();
        next += 4096;
        if client.is_over() || !raw.define(template, &items) {
            break;
        }
    }
    let reason = raw.ended();
    assert!(client.is_over(), "{next} values of 4 MiB");
    assert!(reason.or(client.reason()).unwrap().contains("quota"));
    lives(&server);
}

#[test]
fn recalls_of_values_to_come_do_not_hold_up_others() {
    let server = server(64 << 20);
    let (mut raw, _client) = raw(&server);
    let capability = |id: u64| std::array::from_fn(|k| id.to_le_bytes()[k % 8] ^ 0x5a);
    let ask = |raw: &mut Raw, id: u64| {
        let milliseconds = 3_600_000;
        raw.send(&Message::Expose { id: Id(id), capability: capability(id), fetches: 1, milliseconds });
        assert!(raw.send(&Message::Recall { request: id, capability: capability(id) }));
    };
    // More than may wait at once, for what the stream has not come to.
    (2..=200).for_each(|id| ask(&mut raw, id));
    ask(&mut raw, 1);
    let answer = |raw: &mut Raw| loop {
        match raw.answer().expect("an answer") {
            (kind::VALUE, payload) => break kiln_ir::wire::Reader::new(&payload).int().unwrap(),
            (kind::PIECE, _) => {}
            (other, _) => panic!("an answer of kind {other}"),
        }
    };
    upload(&mut raw, 1, 4);
    assert_eq!(answer(&mut raw), 1);
    (2..=200).for_each(|id| upload(&mut raw, id, 4));
    let mut all: Vec<u64> = (2..=200).map(|_| answer(&mut raw)).collect();
    all.sort_unstable();
    assert_eq!(all, (2..=200).collect::<Vec<u64>>());
    lives(&server);
}

#[test]
fn what_the_stream_has_freed_is_recalled_at_once() {
    let server = server(64 << 20);
    let (mut raw, _client) = raw(&server);
    let expose_and_recall = |raw: &mut Raw, request: u64, capability| {
        let milliseconds = 3_600_000;
        raw.send(&Message::Expose { id: Id(1), capability, fetches: 9, milliseconds });
        assert!(raw.send(&Message::Recall { request, capability }));
        loop {
            match raw.answer().expect("an answer").0 {
                kind::PIECE => {}
                other => break other,
            }
        }
    };
    upload(&mut raw, 1, 4);
    assert_eq!(expose_and_recall(&mut raw, 1, [1; 32]), kind::VALUE);
    assert!(raw.define(1, &[Item::Free(Id(1))]));
    // Exposed before it was freed, and after.
    assert_eq!(expose_and_recall(&mut raw, 2, [1; 32]), kind::VALUE);
    assert_eq!(expose_and_recall(&mut raw, 3, [2; 32]), kind::FAILED);
    lives(&server);
}

#[test]
fn exposures_of_a_session_are_bounded() {
    let server = server(64 << 20);
    let (mut raw, client) = raw(&server);
    for i in 0..20_000u64 {
        let capability = std::array::from_fn(|k| i.to_le_bytes()[k % 8] ^ k as u8);
        let expose = Message::Expose { id: Id(1), capability, fetches: 1, milliseconds: 3_600_000 };
        if !raw.send(&expose) {
            break;
        }
    }
    assert!(server.until(PATIENCE, |_| client.is_over()));
    assert!(client.reason().unwrap().contains("exposed"));
    assert!(server.server.registry.moves().count() <= 1 << 14);
    assert!(server.until(PATIENCE, |s| s.server.registry.moves().count() == 0), "they end with the session");
}

#[test]
fn a_batch_has_a_most() {
    let server = server(64 << 20);
    for (count, operands, fits) in
        [(8192, 1, true), (8193, 1, false), (1, 1 << 16, true), (1, (1 << 16) + 1, false)]
    {
        let (mut raw, client) = raw(&server);
        upload(&mut raw, 1, 4);
        let op =
            kiln_ir::text::parse_op(if operands == 1 { "reshape shape=[4]" } else { "cat axis=0" }).unwrap();
        let ins = vec![Id(1); operands];
        let items: Vec<Item> =
            (0..count).map(|i| Item::Run(Node::new(op.clone(), &ins, &[Id(2 + i)]))).collect();
        raw.define(1, &items);
        raw.send(&Message::Sync { request: 5 });
        let start = Instant::now();
        let answer = raw.answer().unwrap().0;
        assert_eq!(answer, if fits { kind::DONE } else { kind::ENDED }, "{count} of {operands}");
        assert_eq!(client.is_over(), !fits);
        assert!(start.elapsed() < PATIENCE);
    }
    lives(&server);
}

/// Computes until it is let go.
struct Blocks;

static GO: AtomicBool = AtomicBool::new(false);

impl CustomOp for Blocks {
    fn name(&self) -> &str {
        "memory.blocks"
    }

    fn infer(&self, _: &[u8], _: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        Ok(smallvec![Meta::new(DType::U8, [1])])
    }

    fn eval(&self, _: &[u8], _: &[(Meta, &[u8])], _: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        let start = Instant::now();
        while !GO.load(Ordering::SeqCst) && start.elapsed() < 3 * PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

#[test]
fn uploads_run_ahead_of_the_stream_only_so_far_and_arrive_whole() {
    register(Blocks).unwrap();
    // What a client in order sends: it stays within its window, so most of it waits there.
    let server = server(256 << 20);
    let remote = open(&server.url(), PATIENCE).unwrap();
    let device = kiln_chaos::program::handle(remote.clone());
    let one = kiln::Tensor::ones([1], &device);
    let call = CustomCall { name: "memory.blocks".into(), attrs: Vec::new() };
    let blocked = kiln::Tensor::apply(Op::Custom(Arc::new(call)), &[&one]).remove(0);
    let answer = blocked.to_data_async();
    let session = |s: &Serving| s.server.registry.list().into_iter().find(|c| c.program != "raw");
    assert!(server.until(PATIENCE, |s| session(s).is_some_and(|c| c.computing().is_some())));
    let (mut raw, client) = raw(&server);
    let call = Op::Custom(Arc::new(CustomCall { name: "memory.blocks".into(), attrs: Vec::new() }));
    raw.define(1, &[Item::Run(Node::new(call, &[], &[Id(9999)]))]);
    assert!(server.until(PATIENCE, |_| client.computing().is_some()));
    for id in 1..100 {
        if client.is_over() {
            break;
        }
        upload(&mut raw, id, 1 << 20);
    }
    assert!(server.until(PATIENCE, |_| client.is_over()), "a client that ignores its window");
    let (ahead, _) = client.session().held();
    assert!(ahead > 16 << 20 && ahead < 48 << 20, "{ahead} bytes ahead");
    assert!(client.reason().unwrap().contains("window"), "{:?}", client.reason());
    // One that keeps to it sends more than that while its session computes, and all of it arrives.
    let writer = device.clone();
    let write = move |i: u8| kiln::Tensor::from_vec(vec![f32::from(i); 1 << 18], [1 << 18], &writer);
    let values = std::thread::spawn(move || (0..100).map(write).collect::<Vec<_>>());
    let other = session(&server).unwrap();
    let far = server.until(PATIENCE, |_| other.session().held().0 > 32 << 20);
    let (held, load) = (other.session().held(), other.computing());
    assert!(far, "{held:?} {load:?}");
    std::thread::sleep(Duration::from_millis(300));
    let (ahead, _) = other.session().held();
    assert!(ahead < 48 << 20, "{ahead} bytes ahead");
    GO.store(true, Ordering::SeqCst);
    assert!(answer.wait().is_ok());
    let values = values.join().unwrap();
    for (i, value) in values.iter().enumerate() {
        assert_eq!(value.to_vec::<f32>().unwrap(), vec![i as f32; 1 << 18]);
    }
    // What does not fit fails alone.
    let large = kiln::Tensor::from_vec(vec![1f32; 48 << 20], [48 << 20], &device);
    let error = large.to_data().unwrap_err();
    assert!(matches!(error.root(), Error::OutOfMemory { .. }), "{error}");
    assert_eq!(values[3].to_vec::<f32>().unwrap(), vec![3.0; 1 << 18]);
    assert_eq!(remote.stats().replayed, 0);
}
