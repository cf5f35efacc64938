//! The golden cases through real servers, over every transport: numbers arrive as they were computed.

mod common;
use common::{Folder, Server, beside, kiln, said, until};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// Passes connections on, and tells what the first bytes of each were and how many were sent in all.
struct Relay {
    place: String,
    first: Arc<Mutex<Vec<Vec<u8>>>>,
    sent: Arc<AtomicU64>,
}

impl Relay {
    fn start(to: &str) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = listener.local_addr().unwrap().to_string();
        let (first, sent, to) =
            (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicU64::new(0)), to.to_string());
        let relay = Relay { place, first: first.clone(), sent: sent.clone() };
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server = TcpStream::connect(&to).unwrap();
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                let (mut back, mut answers) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut answers, &mut back);
                    let _ = back.shutdown(Shutdown::Both);
                });
                let (first, sent) = (first.clone(), sent.clone());
                std::thread::spawn(move || pass(client, server, &first, &sent));
            }
        });
        relay
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, first: &Mutex<Vec<Vec<u8>>>, sent: &AtomicU64) {
    let mut buffer = vec![0; 1 << 16];
    let mut begun = false;
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        if !std::mem::replace(&mut begun, true) {
            first.lock().unwrap().push(buffer[..n.min(16)].to_vec());
        }
        sent.fetch_add(n as u64, SeqCst);
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

#[test]
fn the_golden_cases_hold_over_every_transport() {
    let folder = Folder::new("transports");
    let token = folder.0.join("token");
    std::fs::write(&token, "proofs").unwrap();
    let socket = format!("unix:{}", folder.0.join("socket").display());
    let file = |name: &str| beside("../../checks/chaos/tls").join(name).display().to_string();
    let server = Server::start(&[
        "--listen",
        "127.0.0.1:0",
        "--listen",
        &socket,
        "--tls-cert",
        &file("cert.pem"),
        "--tls-key",
        &file("key.pem"),
    ]);
    let cases = beside("../../checks/conform/cases");
    let count = std::fs::read_to_string(cases.join("cases.jsonl")).unwrap().lines().count();
    assert!(count > 400, "{count} cases");
    let conform = |url: &str| {
        let ended = said(kiln(&["conform", "--json", "--device", url]).arg(&cases)).last();
        assert_eq!((&ended["passed"], &ended["failed"]), (&count.into(), &0.into()), "{url}");
    };
    let ca = format!("&ca={}", file("ca.pem"));
    let transports = [
        ("kiln", "", "frames"),
        ("kiln", "&compress=1", "frames"),
        ("ws", "", "a request"),
        ("ws", "&compress=1", "a request"),
        ("kilns", &ca, "TLS"),
        ("wss", &ca, "TLS"),
    ];
    // How each begins on the wire, before anything else is said.
    let kind = |first: &[u8]| match first {
        [b'G', b'E', b'T', b' ', ..] => "a request",
        [22, 3, ..] => "TLS",
        _ => "frames",
    };
    for (scheme, options, want) in transports {
        let relay = Relay::start(server.place());
        conform(&format!("{scheme}://{}?token-file={}{options}", relay.place, token.display()));
        let first = relay.first.lock().unwrap();
        assert!(!first.is_empty(), "{scheme} took another way");
        assert!(first.iter().all(|first| kind(first) == want), "{scheme}: {first:?}");
    }
    // Cases are too small for compression to matter; batches of images are not.
    let train = ["train", "digits", "--steps", "20", "--digest", "--json"];
    let local = said(&mut kiln(&train)).digest();
    for scheme in ["kiln", "ws"] {
        let sent = ["", "&compress=1"].map(|options| {
            let relay = Relay::start(server.place());
            let url = format!("{scheme}://{}?token-file={}{options}", relay.place, token.display());
            assert_eq!(said(kiln(&train).args(["--device", &url])).digest(), local, "{url}");
            relay.sent.load(SeqCst)
        });
        assert!(sent[1] < sent[0] / 10 * 9, "{scheme}, compressed: {sent:?}");
    }
    // A Unix socket: nothing of it goes through the port.
    conform(&socket);
    until("a session by the socket", || server.times(&socket) > 0);
}
