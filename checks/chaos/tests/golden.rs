//! Old clients' bytes. They were written by versions 1 to 3 and are never changed: every later server serves them, or
//! refuses with the version named. `KILN_BLESS=1` writes files that are missing.

use kiln_chaos::{Options, Raw, Serving, fuzz, hello};
use kiln_device::{Error, Place};
use kiln_ir::wire::{Table, Writer};
use kiln_ir::{DType, Id, Meta, text};
use kiln_remote::protocol::greeting::{Hello, Purpose, Refusal, Welcome};
use kiln_remote::protocol::message::{Message, kind};
use kiln_remote::protocol::{VERSIONS, frame, template};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/remote/golden").join(name)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

/// A file's lines without comments; written first if it is missing and that is wanted.
fn lines(name: &str, make: impl FnOnce() -> String) -> Vec<String> {
    let path = file(name);
    if !path.exists() && kiln_env::BLESS.is_on() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, make()).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines().filter(|l| !l.is_empty() && !l.starts_with('#')).map(str::to_string).collect()
}

/// What a client of today sends, frame by frame: number, kind, payload.
fn script() -> Vec<(u64, u8, Vec<u8>)> {
    let mut frames = vec![(0, kind::HELLO, hello(b"", Purpose::Open { device: String::new() }).encode())];
    let mut seq = 0;
    let mut put = |frames: &mut Vec<(u64, u8, Vec<u8>)>, message: Message<'_>| {
        seq += 1;
        let (kind, body) = message.encode();
        frames.push((seq, kind, body.fields));
    };
    let table = Table::local();
    let batch = |text: &str, first: u64| {
        let mut items = text::parse(text).unwrap().items;
        for item in &mut items {
            let name = |id: &mut Id| {
                if id.0 >= 2 {
                    id.0 += first
                }
            };
            match item {
                kiln_ir::Item::Free(id) => name(id),
                kiln_ir::Item::Run(node) => {
                    node.ins.iter_mut().for_each(name);
                    node.outs.iter_mut().for_each(name);
                }
            }
        }
        template::split(&table, &items, Place::Reuse)
    };
    let program = "a = input f32[2,3]\nb = input i32[2]\nc = full shape=[] value=f32:0.5\nd = mul a c\n\
        e = dot d a transpose=true\nf = sum e axes=[1] keep=true\nfree d\nfree c";
    let numbers: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let meta = Meta::new(DType::F32, [2, 3]);
    put(&mut frames, Message::Upload { transfer: 1, id: Id(0), meta, place: Place::Persistent });
    put(&mut frames, Message::Piece { of: 1, bytes: &numbers[..10] });
    put(&mut frames, Message::Piece { of: 1, bytes: &numbers[10..] });
    let indices = Meta::new(DType::I32, [2]);
    put(&mut frames, Message::Upload { transfer: 2, id: Id(1), meta: indices, place: Place::Reuse });
    put(&mut frames, Message::Piece { of: 2, bytes: &[1, 0, 0, 0, 9, 0, 0, 0] });
    let (first, second) = (batch(program, 0), batch(program, 100));
    assert_eq!(first.structure, second.structure);
    let mut w = Writer::default();
    w.int(first.bindings.len() as u64);
    template::difference(&[], &first.bindings, &mut w);
    put(&mut frames, Message::Define { template: 0, structure: &first.structure, bindings: &w.bytes });
    let mut w = Writer::default();
    template::difference(&first.bindings, &second.bindings, &mut w);
    put(&mut frames, Message::Call { template: 0, bindings: &w.bytes });
    for (request, id) in [(1, 4), (2, 5), (3, 105)] {
        put(&mut frames, Message::Read { request, id: Id(id), background: false });
    }
    put(&mut frames, Message::Digest { request: 4, id: Id(104) });
    // An index that is out of range.
    let failing = batch("a = input f32[2,3]\nb = input i32[2]\nc = take a b axis=0", 300);
    let mut w = Writer::default();
    w.int(failing.bindings.len() as u64);
    template::difference(&[], &failing.bindings, &mut w);
    put(&mut frames, Message::Define { template: 1, structure: &failing.structure, bindings: &w.bytes });
    put(&mut frames, Message::Read { request: 5, id: Id(302), background: false });
    put(&mut frames, Message::Read { request: 6, id: Id(999), background: false });
    if VERSIONS.1 >= 2 {
        let cause = Arc::new(Error::Index { op: "take".into(), index: 9, length: 3 });
        let error = Error::Failed { op: "take".into(), value: Id(400), origin: None, cause };
        put(&mut frames, Message::Poison { id: Id(401), error });
        put(&mut frames, Message::Read { request: 8, id: Id(401), background: false });
    }
    put(&mut frames, Message::Forget { template: 0 });
    put(&mut frames, Message::Sync { request: 7 });
    frames
}

/// Sends frames to a server and gives the numbered answers, up to that of the last request.
fn answers(frames: &[(u64, u8, Vec<u8>)], version: u64) -> Vec<(u64, u8, Vec<u8>)> {
    let server = Serving::start(Options::default());
    let mut raw = Raw::connect(server.address());
    for (seq, kind, payload) in frames {
        let head = frame::head(*seq, *kind, [payload, &[]]);
        assert!(raw.bytes(&[&head[..], payload].concat()), "the server hangs up");
    }
    let mut answers = Vec::new();
    loop {
        let (seq, kind, payload) = raw.frame().expect("an answer to the last request");
        match (seq, kind) {
            (0, kind::REFUSED) => panic!("refused: {}", Refusal::decode(&payload).unwrap()),
            (0, kind::WELCOME) => assert_eq!(Welcome::decode(&payload).unwrap().version, version),
            (0, _) => {}
            _ => answers.push((seq, kind, payload)),
        }
        if kind == kind::DONE {
            break;
        }
    }
    raw.bytes(&kiln_remote::protocol::frame::control(kind::BYE, &[]));
    assert!(server.until(std::time::Duration::from_secs(2), |s| s.sessions() == 0), "goodbye is heard");
    answers
}

#[test]
fn clients_of_all_versions_are_served() {
    for version in 1..=VERSIONS.1 {
        let make = || {
            assert_eq!(version, VERSIONS.1, "what an older client sent is not made up afterwards");
            let mut text = format!(
                "# A whole conversation of a client of version {version}: `>` what it sends, `<` the numbered answers.\n\
                # Number, kind, payload. Never changed: later servers must still serve it.\n"
            );
            let frames = script();
            for (way, (seq, kind, payload)) in
                frames.iter().map(|f| (">", f)).chain(answers(&frames, version).iter().map(|f| ("<", f)))
            {
                text += &format!("{way} {seq} {kind} {}\n", hex(payload));
            }
            text
        };
        let (mut sent, mut expected) = (Vec::new(), Vec::new());
        for line in lines(&format!("conversation-{version}.txt"), make) {
            let parts: Vec<&str> = line.split(' ').collect();
            let frame = (parts[1].parse().unwrap(), parts[2].parse().unwrap(), unhex(parts[3]));
            if parts[0] == ">" { sent.push(frame) } else { expected.push(frame) }
        }
        assert_eq!(answers(&sent, version), expected);
        let kinds: Vec<u8> = expected.iter().map(|f| f.1).collect();
        for kind in [kind::VALUE, kind::PIECE, kind::ANSWER, kind::FAULT, kind::FAILED, kind::DONE] {
            assert!(kinds.contains(&kind), "kind {kind} is in the conversation");
        }
    }
}

#[test]
fn messages_of_all_versions_read_as_they_were_written() {
    let old = || panic!("the messages of older versions are missing");
    let known: Vec<String> =
        ["messages-1.txt", "messages-2.txt"].iter().flat_map(|name| lines(name, old)).collect();
    let make = || {
        let mut text =
            "# What version 3 has besides the messages of versions 1 and 2: kind and payload. Never changed.\n"
                .to_string();
        for line in fuzz::seeds("messages").iter().map(|bytes| format!("{} {}", bytes[0], hex(&bytes[1..]))) {
            if !known.contains(&line) {
                text += &format!("{line}\n");
            }
        }
        text
    };
    let newest = lines("messages-3.txt", make);
    let mut kinds = std::collections::BTreeSet::new();
    for line in known.into_iter().chain(newest) {
        let (kind, payload) = line.split_once(' ').unwrap();
        let (kind, payload) = (kind.parse::<u8>().unwrap(), unhex(payload));
        kinds.insert(kind);
        let again = match kind {
            kind::HELLO => Hello::decode(&payload).map(|m| m.encode()),
            kind::WELCOME => Welcome::decode(&payload).map(|m| m.encode()),
            kind::REFUSED => Refusal::decode(&payload).map(|m| m.encode()),
            kind => Message::decode(kind, &payload, &mut Vec::new()).map(|m| m.encode().1.fields),
        };
        assert_eq!(again.as_deref().map(hex), Ok(hex(&payload)), "kind {kind}");
    }
    assert_eq!(kinds.len(), 29, "{kinds:?}");
}
