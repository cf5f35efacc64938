//! Inputs to start from: what an honest client says.

use crate::raw::hello;
use kiln_device::{Batch, Bytes, Data, Error, Place, pending};
use kiln_ir::wire::Table;
use kiln_ir::{DType, Id, Meta, text};
use kiln_remote::client::core::{Config, Core, Login};
use kiln_remote::protocol::frame::Decoder;
use kiln_remote::protocol::frame::control;
use kiln_remote::protocol::greeting::{Purpose, Refusal, Welcome};
use kiln_remote::protocol::message::{Message, Query, kind};
use kiln_remote::protocol::template::split;
use std::sync::Arc;

/// Honest inputs for a target.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    match target {
        "frames" => {
            let frames = conversation();
            let all: Vec<u8> = frames.iter().flat_map(|f| f.3.clone()).collect();
            [0u8, 6, 255].iter().map(|n| [&[*n][..], &all].concat()).collect()
        }
        "messages" => messages(),
        "grammar" => (0..64u8).map(|n| vec![n, n.wrapping_mul(37), n ^ 85]).collect(),
        "recordings" | "plans" | "checkpoints" => super::files::seeds(target),
        _ => vec![session(&conversation()), Vec::new()],
    }
}

/// A program with a bit of everything.
const PROGRAM: &str = "a = input f32[2,3]\nb = input f32[3,2]\n\
    c = full shape=[2,3] value=f32:0.5\nd = add a c\ne = exp d\nfree d\nf = sum e axes=[1] keep=false\n\
    g = permute b order=[1,0]\nh = mul g e\nfree e\nfree c";

type Sent = (u64, u8, Vec<u8>, Vec<u8>);

/// What a client sends for a small program: number, kind, payload and whole bytes of each frame.
fn conversation() -> Vec<Sent> {
    let mut core = Core::new(Config {
        peer: "seed".into(),
        program: "seed".into(),
        most_lineage: 1 << 20,
        most_snapshot: 1 << 20,
        most_stored: 0,
        replay_micros: u64::MAX,
        replay_bytes: usize::MAX,
        any_numerics: false,
    });
    let login = Login { device: String::new(), token: Vec::new(), recover: false, compress: false };
    let _ = core.hello(&login, false);
    let mut greeting = Decoder::default();
    greeting.feed(&control(kind::WELCOME, &welcome().encode()));
    if let Ok(Some(frame)) = greeting.next() {
        let _ = core.receive(&frame);
    }
    let mut program = text::parse(PROGRAM).expect("a program").items;
    let data = |shape: [usize; 2]| {
        let count = shape[0] * shape[1];
        let content = (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect::<Vec<u8>>();
        Data::new(Meta::new(DType::F32, shape), Bytes::new(content))
    };
    core.write(Id(0), data([2, 3]), Place::Reuse);
    core.write(Id(1), data([3, 2]), Place::Persistent);
    core.submit(Batch { items: program.clone(), ..Batch::default() });
    // The same again under other names.
    for item in &mut program {
        match item {
            kiln_ir::Item::Free(id) if id.0 > 1 => id.0 += 100,
            kiln_ir::Item::Free(_) => {}
            kiln_ir::Item::Run(node) => {
                node.outs.iter_mut().for_each(|id| id.0 += 100);
                node.ins.iter_mut().filter(|id| id.0 > 1).for_each(|id| id.0 += 100);
            }
        }
    }
    core.submit(Batch { items: program, ..Batch::default() });
    core.read(Id(5), None, pending(None).0);
    core.sync(pending(None).0);
    core.query(Query::Memory, pending(None).0);
    let mut sent = Vec::new();
    while let Some(out) = core.next() {
        let whole = out.bytes().expect("it is in memory");
        let mut seq = [0; 8];
        seq.copy_from_slice(&whole[8..16]);
        sent.push((u64::from_le_bytes(seq), whole[16], whole[17..].to_vec(), whole.clone()));
    }
    sent
}

/// A conversation in the session target's form, with a control frame and a new connection in it.
fn session(frames: &[Sent]) -> Vec<u8> {
    let mut input = Vec::new();
    let mut put = |kind: u8, payload: &[u8]| {
        input.extend([kind, payload.len() as u8, (payload.len() >> 8) as u8]);
        input.extend_from_slice(payload);
    };
    for (i, (_, kind, payload, _)) in frames.iter().enumerate() {
        put(*kind, payload);
        if i == 3 {
            put(254, &[kind::PING, 1]);
            put(253, &[0]);
        }
    }
    put(254, &[kind::BYE]);
    input
}

fn welcome() -> Welcome {
    let mut table = kiln_ir::wire::Writer::default();
    Table::local().encode(&mut table);
    Welcome {
        advertise: String::new(),
        version: 1,
        session: 2,
        secret: [3; 32],
        incarnation: 4,
        resumed: None,
        lease: 5,
        heartbeat: 6,
        compress: false,
        info: kiln_device::Driver::info(&kiln_cpu::Reference::start()),
        table: table.bytes,
    }
}

/// One of every message, as kind and payload.
fn messages() -> Vec<Vec<u8>> {
    let meta = Meta::new(DType::F32, [2, 3]);
    let program = text::parse(PROGRAM).expect("a program").items;
    let split = split(&Table::local(), &program, Place::Reuse);
    let mut bindings = kiln_ir::wire::Writer::default();
    bindings.int(split.bindings.len() as u64);
    kiln_remote::protocol::template::difference(&[], &split.bindings, &mut bindings);
    let cause = Error::Index { op: "take".into(), index: 9, length: 3 };
    let error = Error::Failed { op: "take".into(), value: Id(8), origin: None, cause: Arc::new(cause) };
    let memory = Error::OutOfMemory { asked: 10, free: 2, limit: 5 };
    let list = [
        Message::Ack { seq: 5, limit: 1 << 23 },
        Message::Ping(1),
        Message::Pong(1),
        Message::Bye,
        Message::Drain,
        Message::Progress { tasks: 3, micros: 400 },
        Message::Define { template: 0, structure: &split.structure, bindings: &bindings.bytes },
        Message::Call { template: 0, bindings: &[0, 2] },
        Message::Forget { template: 0 },
        Message::Upload { transfer: 1, id: Id(4), meta, place: Place::Reuse },
        Message::Piece { of: 1, bytes: &[0; 24] },
        Message::Read { request: 1, id: Id(4), background: false },
        Message::Digest { request: 2, id: Id(4) },
        Message::Sync { request: 3 },
        Message::Query { request: 4, query: Query::Limit(Some(1 << 30)) },
        Message::Query { request: 5, query: Query::Trace(true) },
        Message::Query { request: 6, query: Query::Spans },
        Message::Expose { id: Id(4), capability: [5; 32], fetches: 1, milliseconds: 1000 },
        Message::Fetch {
            incarnation: 1,
            transfer: 2,
            id: Id(5),
            meta,
            place: Place::Persistent,
            url: "kiln://host:1",
            capability: [5; 32],
        },
        Message::Recall { request: 5, capability: [6; 32] },
        Message::Withdraw { transfer: 2, error: error.clone() },
        Message::Poison { id: Id(9), error: error.clone() },
        Message::Value { request: 1, meta },
        Message::Done { request: 3 },
        Message::Failed { request: 1, error: memory },
        Message::Fault { value: Id(8), error },
        Message::Answer { request: 4, content: &[1, 2, 3] },
        Message::Lost { transfer: 2, reason: "gone" },
    ];
    let mut all: Vec<Vec<u8>> = list
        .iter()
        .map(|message| {
            let (kind, body) = message.encode();
            [&[kind][..], &body.fields].concat()
        })
        .collect();
    let mut greeting = |kind: u8, payload: Vec<u8>| all.push([&[kind][..], &payload].concat());
    let short = |purpose| {
        let mut hello = hello(b"token", purpose);
        hello.table.truncate(2);
        hello.encode()
    };
    greeting(kind::HELLO, short(Purpose::Open { device: "cpu".into() }));
    greeting(kind::HELLO, short(Purpose::Resume { session: 1, secret: [2; 32], epoch: 3, received: 4 }));
    greeting(kind::HELLO, short(Purpose::Fetch { capability: [2; 32], transfer: 9, from: 0 }));
    greeting(kind::HELLO, short(Purpose::Fetch { capability: [2; 32], transfer: 9, from: 5 }));
    greeting(kind::HELLO, short(Purpose::Watch));
    let mut short = welcome();
    short.table.truncate(2);
    greeting(kind::WELCOME, short.encode());
    for refusal in [Refusal::Version(1, 1), Refusal::Token, Refusal::Device("x".into()), Refusal::Full(9)] {
        greeting(kind::REFUSED, refusal.encode());
    }
    all
}
