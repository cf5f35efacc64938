//! Those who have no token, and what clients name that is not theirs: nobody else waits for them.

use kiln_chaos::program::stream;
use kiln_chaos::{Options, Raw, Serving, hello, open};
use kiln_cpu::Cpu;
use kiln_device::{Bytes, Data, Place};
use kiln_ir::custom::{CustomOp, register};
use kiln_ir::{CustomCall, DType, Id, Item, Meta, Node, Op, OpError};
use kiln_remote::protocol::greeting::Purpose;
use kiln_remote::protocol::message::{Message, kind};
use kiln_remote::server::moves::Shown;
use smallvec::{SmallVec, smallvec};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);
/// Far longer than what must not be waited for, and shorter than what it must not wait for.
const SOON: Duration = Duration::from_secs(4);

fn lives(server: &Serving) {
    let remote = open(&server.url(), PATIENCE).unwrap();
    assert_eq!(stream(&*remote, 5, 30), stream(&Cpu::start(), 5, 30));
}

fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

/// Computes until it is let go.
struct Blocks;

static BLOCKED: AtomicBool = AtomicBool::new(false);
static GO: AtomicBool = AtomicBool::new(false);

impl CustomOp for Blocks {
    fn name(&self) -> &str {
        "strangers.blocks"
    }

    fn infer(&self, _: &[u8], _: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        Ok(smallvec![Meta::new(DType::U8, [1])])
    }

    fn eval(&self, _: &[u8], _: &[(Meta, &[u8])], _: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        BLOCKED.store(true, Ordering::SeqCst);
        let start = Instant::now();
        while !GO.load(Ordering::SeqCst) && start.elapsed() < 3 * PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

#[test]
fn a_client_that_comes_back_does_not_wait_for_what_it_computes() {
    register(Blocks).unwrap();
    let server = Serving::start(Options::default());
    let (mut raw, welcome) = Raw::open(server.address());
    let call = Op::Custom(Arc::new(CustomCall { name: "strangers.blocks".into(), attrs: Vec::new() }));
    raw.define(1, &[Item::Run(Node::new(call, &[], &[Id(1)]))]);
    assert!(server.until(PATIENCE, |_| BLOCKED.load(Ordering::SeqCst)));
    drop(raw);
    let start = Instant::now();
    let (session, secret) = (welcome.session, welcome.secret);
    for epoch in 1..4 {
        let mut again = Raw::connect(server.address());
        let resume = Purpose::Resume { session, secret, epoch, received: 0 };
        assert!(again.greet(&hello(b"", resume)).unwrap().resumed.is_some());
        assert!(get(server.address(), "/healthz").ends_with("ok\n"));
    }
    lives(&server);
    assert!(!GO.swap(true, Ordering::SeqCst) && start.elapsed() < PATIENCE, "{:?}", start.elapsed());
}

#[test]
fn an_older_connection_is_closed_when_a_newer_one_comes() {
    let server = Serving::start(Options { heartbeat: Duration::from_secs(60), ..Options::default() });
    let (mut first, welcome) = Raw::open(server.address());
    let (session, secret) = (welcome.session, welcome.secret);
    let mut second = Raw::connect(server.address());
    second.greet(&hello(b"", Purpose::Resume { session, secret, epoch: 1, received: 0 })).unwrap();
    // Three heartbeats are far away.
    first.stream.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(first.frame().is_none());
    assert_eq!(first.stream.read(&mut [0]).unwrap_or(1), 0, "it was closed");
}

#[test]
fn a_crowd_does_not_keep_a_right_token_out() {
    let token = b"the-right-token".to_vec();
    let server = Serving::start(Options { token: Some(token.clone()), ..Options::default() });
    let address = server.address();
    for i in 0..12 {
        let mut raw = Raw::connect(address);
        raw.bytes(&kiln_remote::protocol::frame::control(
            kind::HELLO,
            &hello(format!("wrong-{i}").as_bytes(), Purpose::Watch).encode(),
        ));
    }
    assert!(
        server.until(PATIENCE, |s| s.log().iter().filter(|l| l.contains("token is wrong")).count() >= 10)
    );
    // Now the host is suspect. Wrong tokens that wait for their answer, then silent ones, and it gets in all the same.
    let mut crowd = Vec::new();
    for i in 0..300 {
        let mut raw = Raw::connect(address);
        if i % 2 == 0 {
            let wrong = hello(b"wrong again", Purpose::Watch).encode();
            raw.bytes(&kiln_remote::protocol::frame::control(kind::HELLO, &wrong));
        }
        crowd.push(raw);
    }
    let start = Instant::now();
    let open = Purpose::Open { device: String::new() };
    assert!(Raw::connect(address).greet(&hello(&token, open)).is_ok());
    assert!(get(address, "/healthz").ends_with("ok\n"));
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    // Those who came first had to make room.
    let mut gone = 0;
    for raw in &mut crowd[..60] {
        raw.stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        gone += usize::from(raw.stream.read(&mut [0; 64]).is_ok());
    }
    assert!(gone > 50, "{gone}");
}

#[test]
fn a_client_that_was_closed_before_an_answer_comes_again() {
    let server = Serving::start(Options::default());
    let (listener, home) = (TcpListener::bind("127.0.0.1:0").unwrap(), server.address());
    let address = listener.local_addr().unwrap();
    let relay = std::thread::spawn(move || {
        // As a server does that makes room for others.
        (0..3).for_each(|_| drop(listener.accept().unwrap()));
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(home).unwrap();
        let pairs = [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)];
        let copies = pairs.map(|(mut from, mut to)| {
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(std::net::Shutdown::Write);
            })
        });
        copies.into_iter().for_each(|copy| copy.join().unwrap());
    });
    let start = Instant::now();
    let remote = open(&format!("kiln://{address}"), PATIENCE).unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(stream(&*remote, 5, 30), stream(&Cpu::start(), 5, 30));
    drop(remote);
    relay.join().unwrap();
    // One that closes for ever is given up soon.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || while listener.accept().is_ok() {});
    let start = Instant::now();
    assert!(open(&format!("kiln://{address}"), PATIENCE).is_err());
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
}

#[test]
fn fetches_of_what_is_not_exposed_hold_up_no_others() {
    let server = Serving::start(Options::default());
    let (_raw, _) = Raw::open(server.address());
    let session = server.server.registry.list()[0].number;
    let ask = |capability, transfer| {
        let mut raw = Raw::connect(server.address());
        raw.greet(&hello(b"", Purpose::Fetch { capability, transfer, from: 0 })).unwrap();
        raw
    };
    let strangers: Vec<_> = (0..150u8).map(|i| ask([i; 32], 1)).collect();
    let capability = [200; 32];
    let value = Ok(Data::new(Meta::new(DType::U8, [3]), Bytes::new(vec![1u8, 2, 3])));
    let shown = Shown { capability, fetches: 1, patience: PATIENCE, value };
    server.server.registry.moves().expose(session, shown);
    let mut raw = Raw::connect(server.address());
    // Asked for with a mask, as servers do.
    let masked = Purpose::Masked { mask: [0x5a; 32], capability, transfer: 9, from: 0 };
    let welcome = raw.greet(&hello(b"", masked)).unwrap();
    assert!(welcome.advertise.is_empty() && welcome.lease == 0, "strangers are told little");
    assert_eq!(raw.answer().unwrap().0, kind::VALUE);
    drop(strangers);
}

/// A frame of a WebSocket from a client, with a mask of zeros.
fn message(payload: &[u8], len: u64) -> Vec<u8> {
    let mut bytes = vec![0x82, 0x80 | 127];
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(payload);
    bytes
}

fn upgrade(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(UPGRADE).unwrap();
    let mut answer = [0; 1024];
    let n = stream.read(&mut answer).unwrap();
    assert!(answer[..n].starts_with(b"HTTP/1.1 101"));
    stream
}

const UPGRADE: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
    Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

#[test]
fn a_websocket_holds_neither_another_one_nor_endless_messages() {
    let server = Serving::start(Options::default());
    for words in [message(UPGRADE, UPGRADE.len() as u64), message(&[], 64 << 20)] {
        let mut stream = upgrade(server.address());
        stream.write_all(&words).unwrap();
        let mut answer = Vec::new();
        let end = stream.read_to_end(&mut answer);
        assert!(end.is_ok(), "it was not closed: {end:?}");
        assert!(!answer.windows(4).any(|w| w == b"HTTP"), "upgraded again");
    }
    // Few of them at once, and those who come are served.
    let many: Vec<_> = (0..40).map(|_| upgrade(server.address())).collect();
    assert!(open(&server.url().replace("kiln://", "ws://"), PATIENCE).is_ok());
    let closed = many[..30].iter().filter(|stream| (&**stream).read_to_end(&mut Vec::new()).is_ok());
    assert!(closed.count() >= 25);
    lives(&server);
}

#[test]
fn those_who_look_on_are_few() {
    let server = Serving::start(Options::default());
    let mut refused = 0;
    let mut watchers = Vec::new();
    for _ in 0..80 {
        let mut raw = Raw::connect(server.address());
        refused += usize::from(raw.greet(&hello(b"", Purpose::Watch)).is_err());
        watchers.push(raw);
    }
    assert_eq!(refused, 16);
    drop(watchers);
    let again = |_: &Serving| Raw::connect(server.address()).greet(&hello(b"", Purpose::Watch)).is_ok();
    assert!(server.until(PATIENCE, again), "their places are free again");
}

#[test]
fn the_address_of_a_peer_opens_no_file_and_carries_no_words() {
    let server = Serving::start(Options::default());
    let fifo = std::env::temp_dir().join(format!("kiln-fifo-{}", std::process::id()));
    let _ = std::fs::remove_file(&fifo);
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let (mut raw, _) = Raw::open(server.address());
    raw.stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let meta = Meta::new(DType::U8, [8]);
    let capability = *b"\r\nFLUSHALL\r\nFLUSHALL\r\nFLUSHALL\r\n";
    let fetch = |raw: &mut Raw, transfer: u64, url: &str| {
        let (id, place) = (Id(transfer), Place::Reuse);
        raw.send(&Message::Fetch { transfer, id, meta, place, incarnation: 1, url, capability });
        let (kind, payload) = raw.answer().unwrap();
        match Message::decode(kind, &payload, &mut Vec::new()).unwrap() {
            Message::Lost { reason, .. } => reason.to_string(),
            other => panic!("{other:?}"),
        }
    };
    // Reading a file with two ends waits for the other one, for ever.
    let port = server.address().port();
    for option in [format!("?ca={}", fifo.display()), format!("?token-file={}", fifo.display())] {
        let reason = fetch(&mut raw, 1 + option.len() as u64, &format!("kilns://127.0.0.1:{port}{option}"));
        assert!(reason.contains("options"), "{reason}");
        assert!(get(server.address(), "/healthz").ends_with("ok\n"));
    }
    // A port that somebody else has hears nothing that the client has chosen, and the client nothing of it.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = listener.local_addr().unwrap();
    let heard = std::thread::spawn(move || {
        let mut heard = Vec::new();
        for _ in 0..3 {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            let mut words = [0; 4096];
            let n = stream.read(&mut words).unwrap_or(0);
            heard.extend_from_slice(&words[..n]);
            let _ = stream.write_all(b"-ERR secret of another program\r\n");
        }
        heard
    });
    let reason = fetch(&mut raw, 1000, &format!("kiln://{other}"));
    let heard = heard.join().unwrap();
    assert!(heard.len() > 64 && !heard.windows(8).any(|w| w == b"FLUSHALL"), "{heard:?}");
    assert_eq!(
        reason,
        fetch(&mut raw, 1001, "kiln://127.0.0.1:1"),
        "an open port and a closed one look alike"
    );
    let _ = std::fs::remove_file(&fifo);
    lives(&server);
}
