//! Encrypted connections, cut and corrupted: what the proxy sees are bytes, and the program's bits stay the same.

use kiln_chaos::program::train;
use kiln_chaos::{At, Options, Proxy, Random, Serving, Way, What, open, tls};
use kiln_cpu::Cpu;
use kiln_device::Error;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const STEPS: u64 = 24;
const PATIENCE: Duration = Duration::from_secs(10);

fn local() -> &'static str {
    static DIGEST: OnceLock<String> = OnceLock::new();
    DIGEST.get_or_init(|| train(Arc::new(Cpu::start()), STEPS).unwrap())
}

fn pair() -> (Serving, Proxy) {
    let server = Serving::start(Options { tls: true, ..Options::default() });
    let proxy = Proxy::start(server.address());
    (server, proxy)
}

fn url(scheme: &str, proxy: &Proxy) -> String {
    format!("{scheme}://{}?ca={}", proxy.address(), tls("ca.pem").display())
}

#[test]
fn cuts_and_flipped_bits_under_tls_change_no_bit() {
    for scheme in ["kilns", "wss"] {
        let (_server, proxy) = pair();
        let remote = open(&url(scheme, &proxy), PATIENCE).unwrap();
        let [up, down] = proxy.counts().bytes;
        assert_eq!(train(remote.clone(), STEPS).unwrap(), local());
        let (counts, stats) = (proxy.counts(), remote.stats());
        assert_eq!((counts.connections, stats.resumed), (1, 0));
        // Nothing can be read on the way.
        assert!(counts.frames.iter().flatten().all(|n| *n == 0), "frames are seen through TLS");
        let [up, down] = [counts.bytes[0] - up, counts.bytes[1] - down];
        for seed in 0..4 {
            let mut random = Random(seed);
            let remote = open(&url(scheme, &proxy), PATIENCE).unwrap();
            let seen = proxy.counts();
            for i in 0..4 {
                let (way, most) = if random.one_in(2) { (Way::Up, up) } else { (Way::Down, down) };
                let at = At::Byte(seen.bytes[way as usize] + 1 + random.below(most / 2));
                proxy.arm(way, at, if i % 2 == 0 { What::Cut } else { What::Flip(random.below(8) as u8) });
            }
            assert_eq!(train(remote.clone(), STEPS).unwrap(), local(), "{scheme}, seed {seed}");
            let (counts, stats) = (proxy.counts(), remote.stats());
            assert!(counts.cuts + counts.flips >= seen.cuts + seen.flips + 3, "{scheme}, seed {seed}");
            assert!(stats.resumed >= 1 && stats.replayed == 0, "{scheme}, seed {seed}: {stats:?}");
            proxy.disarm();
        }
    }
}

#[test]
fn a_stalled_tls_handshake_is_given_up_and_tried_again() {
    let (_server, proxy) = pair();
    let remote = open(&url("kilns", &proxy), PATIENCE).unwrap();
    proxy.arm(Way::Down, At::Byte(proxy.counts().bytes[1] + 200), What::Stall);
    proxy.cut_all();
    assert_eq!(train(remote.clone(), STEPS).unwrap(), local());
    assert_eq!((proxy.counts().stalls, remote.stats().replayed), (1, 0));
}

#[test]
fn a_server_that_nobody_vouches_for_is_not_spoken_to() {
    let (server, proxy) = pair();
    let other = format!("kilns://{}?ca={}", proxy.address(), tls("cert.pem").display());
    for url in [other, format!("kilns://{}", proxy.address())] {
        let error = open(&url, Duration::from_millis(300)).map(drop).unwrap_err();
        assert!(
            matches!(&error, Error::Disconnected { reason, .. } if reason.contains("certificate")),
            "{error}"
        );
    }
    // TLS where there is none, on either side, is an error soon.
    let plain = Serving::start(Options::default());
    let error = open(&url("kilns", &Proxy::start(plain.address())), Duration::from_millis(300)).map(drop);
    assert!(matches!(error, Err(Error::Disconnected { .. })), "{error:?}");
    assert_eq!(server.sessions() + plain.sessions(), 0);
    // One port for all: who does not ask for TLS gets the page.
    let mut browser = TcpStream::connect(server.address()).unwrap();
    browser.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    browser.read_to_string(&mut answer).unwrap();
    assert!(answer.ends_with("ok\n"), "{answer}");
}
