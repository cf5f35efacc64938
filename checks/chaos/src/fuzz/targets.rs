//! What is fuzzed. Each target checks what must hold whatever comes, and gives a number for what came of the input.

use crate::raw::hello;
use kiln_cpu::Cpu;
use kiln_ir::wire::Table;
use kiln_remote::protocol::frame::{self, Decoder, HEAD};
use kiln_remote::protocol::greeting::{Hello, Purpose, Refusal, Welcome};
use kiln_remote::protocol::message::{Message, kind};
use kiln_remote::protocol::template::Receiver;
use kiln_remote::protocol::{Frame, ProtocolError};
use kiln_remote::server::registry::{Client, Config, Registry, Visitor};
use kiln_remote::server::session::{Quota, SessionEvent};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// A fuzz target.
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// Takes any bytes; panics if something is wrong.
    pub run: fn(&[u8]) -> u64,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "frames", run: frames },
    Target { name: "messages", run: messages },
    Target { name: "session", run: session },
    Target { name: "grammar", run: super::grammar::grammar },
    Target { name: "recordings", run: super::files::recordings },
    Target { name: "plans", run: super::files::plans },
    Target { name: "checkpoints", run: super::files::checkpoints },
];

pub(super) fn number(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// The sort of an error.
fn sort(error: &ProtocolError) -> String {
    match error {
        ProtocolError::TooLong { .. } => "long".into(),
        ProtocolError::Gap { .. } => "gap".into(),
        ProtocolError::Ack { .. } => "ack".into(),
        ProtocolError::Kind(_) => "kind".into(),
        other => other.to_string(),
    }
}

/// The frame decoder, fed in pieces of a size that the first byte gives: frames come out as they were written, and what
/// it holds stays bounded.
fn frames(input: &[u8]) -> u64 {
    let (size, bytes) = input.split_first().map_or((1, input), |(n, rest)| (1 + *n as usize, rest));
    let mut decoder = Decoder::default();
    let (mut at, mut outcome) = (0, Vec::new());
    for piece in bytes.chunks(size) {
        decoder.feed(piece);
        loop {
            match decoder.next() {
                Ok(Some(frame)) => {
                    let head = frame::head(frame.seq, frame.kind, [frame.payload, &[]]);
                    let end = at + HEAD + frame.payload.len();
                    assert!(
                        bytes[at..end] == [&head[..], frame.payload].concat(),
                        "a frame that was not sent"
                    );
                    at = end;
                    outcome.push((frame.kind, frame.payload.len().min(3)));
                }
                Ok(None) => break,
                Err(e) => return number((outcome, sort(&e))),
            }
        }
        let missing = decoder.missing();
        assert!(missing <= HEAD + frame::MOST || missing <= HEAD + u32::MAX as usize, "it wants {missing}");
    }
    number(outcome)
}

/// Decoders of messages, greetings and templates: what is understood is written the same again.
fn messages(input: &[u8]) -> u64 {
    static TABLE: LazyLock<Table> = LazyLock::new(Table::local);
    let Some((&first, payload)) = input.split_first() else { return 0 };
    match first {
        kind::HELLO => match Hello::decode(payload) {
            Ok(hello) => {
                let known = hello.versions == kiln_remote::protocol::VERSIONS;
                assert!(!known || Hello::decode(&hello.encode()).as_ref() == Ok(&hello));
                number((1, std::mem::discriminant(&hello.purpose), hello.table.len().min(2)))
            }
            Err(e) => number((1, sort(&e))),
        },
        kind::WELCOME => match Welcome::decode(payload) {
            Ok(welcome) => {
                assert!(Welcome::decode(&welcome.encode()).as_ref() == Ok(&welcome));
                number((2, welcome.resumed.is_some(), welcome.info.usage.len()))
            }
            Err(e) => number((2, sort(&e))),
        },
        kind::REFUSED => match Refusal::decode(payload) {
            Ok(refusal) => {
                assert!(Refusal::decode(&refusal.encode()).as_ref() == Ok(&refusal));
                number((3, std::mem::discriminant(&refusal)))
            }
            Err(e) => number((3, sort(&e))),
        },
        kind => {
            let mut scratch = Vec::new();
            let message = match Message::decode(kind, payload, &mut scratch) {
                Ok(message) => message,
                Err(e) => return number((kind, sort(&e))),
            };
            let (again, body) = message.encode();
            let mut second = Vec::new();
            let same = Message::decode(again, &body.fields, &mut second);
            assert!(same.as_ref() == Ok(&message), "{message:?} became {same:?}");
            let Message::Define { template, structure, bindings } = message else {
                return number((kind, "read"));
            };
            let mut receiver = Receiver::default();
            match receiver.define(&TABLE, template, structure, bindings) {
                Err(e) => number((kind, sort(&e))),
                Ok(batch) => {
                    // Its own structure calls it again, and a sender splits it to the same batch.
                    let split = kiln_remote::protocol::template::split(&TABLE, &batch.items, batch.place);
                    let joined =
                        kiln_remote::protocol::template::join(&TABLE, &split.structure, &split.bindings);
                    assert!(
                        !is_plain(&batch.items) || joined.is_ok_and(|b| b.items == batch.items),
                        "{:?}",
                        batch.items
                    );
                    assert!(receiver.call(&TABLE, template, &[]).is_ok_and(|b| b.items == batch.items));
                    let names: Vec<_> = batch.items.iter().take(2).map(shape_of).collect();
                    number((kind, names))
                }
            }
        }
    }
}

/// Whether every value is defined once, and before it is used if it is defined at all: senders write nothing else.
fn is_plain(items: &[kiln_ir::Item]) -> bool {
    let mut named = std::collections::HashSet::new();
    items.iter().all(|item| match item {
        kiln_ir::Item::Free(id) => {
            named.insert(*id);
            true
        }
        kiln_ir::Item::Run(node) => {
            named.extend(node.ins.iter().copied());
            node.outs.iter().all(|id| named.insert(*id))
        }
    })
}

fn shape_of(item: &kiln_ir::Item) -> String {
    match item {
        kiln_ir::Item::Free(_) => "free".into(),
        kiln_ir::Item::Run(node) => node.op.name().into(),
    }
}

/// What a fuzzed session may hold.
const QUOTA: Quota = Quota { bytes: 1 << 20, values: 512 };

/// A session that gets frames of any kind and content, executed as far as it goes. The input is a list of (kind, length
/// in two bytes, payload); kind 254 makes the payload's first byte a control frame's kind, 253 is a new connection.
fn session(input: &[u8]) -> u64 {
    // Operation tables are large; what does not depend on the input is made once.
    static GREETING: LazyLock<Vec<u8>> =
        LazyLock::new(|| hello(b"", Purpose::Open { device: String::new() }).encode());
    static REGISTRY: LazyLock<Registry> = LazyLock::new(|| {
        Registry::new(Config {
            token: None,
            quota: QUOTA,
            most_sessions: usize::MAX,
            lease: Duration::from_secs(1),
            heartbeat: Duration::from_secs(1),
            offered: vec!["cpu".into()],
            devices: Box::new(|_| Some(Arc::new(Cpu::start()))),
            random: Box::new(|bytes| bytes.fill(7)),
        })
    });
    let registry = &*REGISTRY;
    let Ok((welcome, Visitor::Session(client, _))) = registry.hello(&GREETING, false, Duration::ZERO) else {
        unreachable!("an empty server takes a session")
    };
    let outcome = conversation(registry, &welcome, &client, input);
    client.end();
    registry.expire(Duration::ZERO);
    outcome
}

fn conversation(registry: &Registry, welcome: &Welcome, client: &Client, input: &[u8]) -> u64 {
    let (mut rest, mut seq, mut epoch) = (input, 0, 0);
    let mut outcome: Vec<String> = Vec::new();
    while let [kind, low, high, after @ ..] = rest {
        let (payload, left) = after.split_at((*low as usize | (*high as usize) << 8).min(after.len()));
        rest = left;
        let received = match (*kind, payload.split_first()) {
            (253, _) => {
                epoch += 1;
                let (session, secret) = (welcome.session, welcome.secret);
                let received = payload.first().map_or(0, |&n| n as u64);
                let mut again = hello(b"", Purpose::Resume { session, secret, epoch, received });
                again.table.clear();
                match registry.hello(&again.encode(), false, Duration::ZERO) {
                    Ok((welcome, _)) => assert_eq!(welcome.resumed, Some(seq)),
                    Err(refusal) => outcome.push(refusal.to_string()),
                }
                continue;
            }
            (254, Some((&kind, payload))) => client.session().receive(&Frame { seq: 0, kind, payload }),
            _ => client.session().receive(&Frame { seq: seq + 1, kind: *kind, payload }),
        };
        match received {
            Ok(SessionEvent::Going | SessionEvent::Ping(_)) => seq += (*kind != 254) as u64,
            Ok(SessionEvent::Ended) => return number((outcome, "ended")),
            Err(e) => return number((outcome, sort(&e))),
        }
        loop {
            match client.work() {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(e) => return number((outcome, "work", sort(&e))),
            }
        }
        let (values, _, operations) = client.executor().held();
        assert!(values <= QUOTA.values, "{values} values");
        let memory = client.executor().device().memory();
        assert!(memory.live_bytes <= 2 * QUOTA.bytes, "{memory:?}");
        while let Some(out) = client.session().next() {
            outcome.push(format!("{}", out.head()[16]));
        }
        outcome.push(format!("{kind} {}", operations.min(3)));
        if outcome.len() > 64 {
            break;
        }
    }
    number(outcome)
}
