//! Connections that break, in every way a proxy can break them: the program's bits stay the same.

use kiln_chaos::program::{self, stream, train};
use kiln_chaos::{At, Options, Proxy, Random, Serving, Way, What, open};
use kiln_cpu::Cpu;
use kiln_device::Observe;
use kiln_remote::Remote;
use kiln_remote::protocol::message::kind;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const STEPS: u64 = 24;
const PATIENCE: Duration = Duration::from_secs(10);
const BEAT: Duration = Duration::from_millis(300);

/// The digest of an undisturbed local run.
fn local() -> &'static str {
    static DIGEST: OnceLock<String> = OnceLock::new();
    DIGEST.get_or_init(|| train(Arc::new(Cpu::start()), STEPS).unwrap())
}

fn pair() -> (Serving, Proxy) {
    let server = Serving::start(Options::default());
    let proxy = Proxy::start(server.address());
    (server, proxy)
}

fn trains(remote: &Arc<Remote>, what: &str) {
    assert_eq!(train(remote.clone(), STEPS).unwrap_or_else(|e| panic!("{what}: {e}")), local(), "{what}");
}

#[test]
fn a_proxy_without_faults_changes_nothing_and_says_so() {
    let (_server, proxy) = pair();
    let remote = open(&proxy.url(""), PATIENCE).unwrap();
    proxy.arm(Way::Up, At::Byte(u64::MAX), What::Cut);
    trains(&remote, "undisturbed");
    let (counts, stats) = (proxy.counts(), remote.stats());
    assert_eq!((counts.connections, counts.cuts, counts.flips, counts.stalls), (1, 0, 0, 0));
    assert_eq!((stats.resumed, stats.replayed), (0, 0));
    assert_eq!(proxy.armed(), 1, "what is far away has not happened");
    // It sees the frames that there are: a few batches are sent whole, and most are called.
    assert_eq!(counts.frames[0][kind::HELLO as usize], 1);
    assert_eq!(counts.frames[0][kind::DEFINE as usize], stats.defined);
    assert_eq!(counts.frames[0][kind::CALL as usize], stats.called);
    assert!(stats.called > stats.defined, "{stats:?}");
}

/// The negative control: without a protocol above it, what the proxy does is there to be seen.
#[test]
fn a_proxy_does_what_it_is_told() {
    let echo = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = echo.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in echo.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(n) = stream.read(&mut buffer) {
                    if n == 0 || stream.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    // A frame is what the proxy expects; its sum does not interest it.
    let frame =
        |payload: &[u8]| [&kiln_remote::protocol::frame::head(1, 77, [payload, &[]])[..], payload].concat();
    let sent = frame(&[0; 100]);
    let through = |proxy: &Proxy| {
        let mut stream = TcpStream::connect(proxy.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        stream.write_all(&sent).unwrap();
        let mut got = Vec::new();
        let mut buffer = [0; 4096];
        while got.len() < sent.len() {
            match stream.read(&mut buffer) {
                Ok(n) if n > 0 => got.extend_from_slice(&buffer[..n]),
                _ => break,
            }
        }
        got
    };
    let proxy = Proxy::start(address);
    assert_eq!(through(&proxy), sent);
    proxy.arm(Way::Down, At::Byte(117 + 50), What::Flip(3));
    let flipped = through(&proxy);
    let bits: u32 = flipped.iter().zip(&sent).map(|(a, b)| (a ^ b).count_ones()).sum();
    assert_eq!((flipped.len(), bits, flipped[49] ^ sent[49]), (sent.len(), 1, 8));
    proxy.arm(Way::Up, At::Byte(2 * 117 + 9), What::Cut);
    assert_eq!(through(&proxy).len(), 0, "a part of a head was sent, nothing came back");
    proxy.arm(Way::Up, At::Before(77, 4), What::Cut);
    assert_eq!(through(&proxy).len(), 0);
    proxy.arm(Way::Down, At::After(77, 3), What::Stall);
    assert_eq!(through(&proxy), sent, "a stall after the frame lets the frame pass");
    proxy.arm(Way::Down, At::Before(77, 4), What::Stall);
    let start = Instant::now();
    assert_eq!(through(&proxy).len(), 0);
    assert!(start.elapsed() > Duration::from_millis(450), "the connection stays open");
    proxy.delay(Duration::from_millis(50));
    let start = Instant::now();
    assert_eq!(through(&proxy), sent);
    assert!(start.elapsed() >= Duration::from_millis(100), "{:?}", start.elapsed());
    proxy.delay(Duration::ZERO);
    proxy.trickle(1, Duration::from_micros(200));
    let start = Instant::now();
    assert_eq!(through(&proxy), sent);
    assert!(start.elapsed() >= Duration::from_millis(20), "{:?}", start.elapsed());
    let counts = proxy.counts();
    assert_eq!((counts.connections, counts.cuts, counts.flips, counts.stalls), (8, 2, 1, 2));
    assert_eq!(proxy.armed(), 0);
}

#[test]
fn a_cut_at_every_kind_of_frame_changes_no_bit() {
    let (_server, proxy) = pair();
    let up = [kind::DEFINE, kind::CALL, kind::UPLOAD, kind::PIECE, kind::READ, kind::SYNC, kind::ACK];
    let down = [kind::VALUE, kind::PIECE, kind::DONE, kind::ACK, kind::PROGRESS];
    let ways = up.iter().map(|k| (Way::Up, *k)).chain(down.iter().map(|k| (Way::Down, *k)));
    for (way, kind) in ways {
        for before in [true, false] {
            let what = format!("{way:?}, kind {kind}, before: {before}");
            let remote = open(&proxy.url(""), PATIENCE).unwrap();
            let seen = proxy.counts();
            // One of the first of this run.
            let nth = seen.frames[way as usize][kind as usize] + 1;
            proxy.arm(way, if before { At::Before(kind, nth) } else { At::After(kind, nth) }, What::Cut);
            trains(&remote, &what);
            // The last acknowledgement may come after the digest.
            let start = Instant::now();
            while proxy.armed() > 0 && start.elapsed() < Duration::from_secs(2) {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(proxy.counts().cuts, seen.cuts + 1, "{what}: it was cut");
            assert_eq!(remote.stats().replayed, 0, "{what}: the session went on");
            drop(remote);
        }
    }
}

#[test]
fn a_cut_in_the_handshake_or_a_heartbeat_is_survived() {
    let hand = [(Way::Up, kind::HELLO), (Way::Down, kind::WELCOME)];
    let beat = [(Way::Up, kind::PING), (Way::Down, kind::PONG)];
    for (way, kind, heart) in
        hand.iter().map(|&(w, k)| (w, k, false)).chain(beat.iter().map(|&(w, k)| (w, k, true)))
    {
        for before in [true, false] {
            let what = format!("{way:?}, kind {kind}, before: {before}");
            // A server of its own: clients of earlier cases would come back too.
            let server = Serving::start(Options { heartbeat: BEAT, ..Options::default() });
            let proxy = Proxy::start(server.address());
            let remote = open(&proxy.url(""), PATIENCE).unwrap();
            let seen = proxy.counts();
            let nth = seen.frames[way as usize][kind as usize] + 1;
            proxy.arm(way, if before { At::Before(kind, nth) } else { At::After(kind, nth) }, What::Cut);
            if !heart {
                // The first connection ends, and then the second in the middle of its welcome.
                proxy.cut_all();
            }
            let start = Instant::now();
            while proxy.armed() > 0 && start.elapsed() < Duration::from_secs(3) {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(proxy.counts().cuts, seen.cuts + 1, "{what}: it was cut");
            trains(&remote, &what);
        }
    }
}

#[test]
fn cuts_at_random_bytes_change_no_bit() {
    let (_server, proxy) = pair();
    let remote = open(&proxy.url(""), PATIENCE).unwrap();
    trains(&remote, "to know how long it is");
    let [up, down] = proxy.counts().bytes;
    for seed in 0..8 {
        let mut random = Random(seed);
        let remote = open(&proxy.url(""), PATIENCE).unwrap();
        let seen = proxy.counts();
        for _ in 0..5 {
            let (way, most) = if random.one_in(2) { (Way::Up, up) } else { (Way::Down, down) };
            let at = seen.bytes[way as usize] + 1 + random.below(most / 2);
            proxy.arm(way, At::Byte(at), What::Cut);
        }
        trains(&remote, &format!("seed {seed}"));
        let counts = proxy.counts();
        assert!(counts.cuts >= seen.cuts + 4, "seed {seed}: {} cuts", counts.cuts - seen.cuts);
        proxy.disarm();
    }
}

#[test]
fn a_damaged_length_does_not_hold_the_connection() {
    for way in [Way::Up, Way::Down] {
        let server = Serving::start(Options { heartbeat: BEAT, ..Options::default() });
        let proxy = Proxy::start(server.address());
        let remote = open(&proxy.url(""), PATIENCE).unwrap();
        let seen = proxy.counts();
        // 256 more than there are: heartbeats would fill them in a minute.
        proxy.arm(way, At::Byte(seen.bytes[way as usize] + 2), What::Flip(0));
        trains(&remote, &format!("{way:?}"));
        let stats = remote.stats();
        assert_eq!(proxy.counts().flips, seen.flips + 1, "{way:?}");
        assert!(stats.resumed + stats.replayed >= 1, "{way:?}: {stats:?}");
    }
}

#[test]
fn flipped_bits_never_become_wrong_numbers() {
    let server = Serving::start(Options { heartbeat: BEAT, ..Options::default() });
    let proxy = Proxy::start(server.address());
    let remote = open(&proxy.url(""), PATIENCE).unwrap();
    trains(&remote, "to know how long it is");
    let [up, down] = proxy.counts().bytes;
    for seed in 0..8 {
        let mut random = Random(seed ^ 0xf11b);
        let remote = open(&proxy.url(""), PATIENCE).unwrap();
        let seen = proxy.counts();
        for _ in 0..4 {
            let (way, most) = if random.one_in(2) { (Way::Up, up) } else { (Way::Down, down) };
            let at = seen.bytes[way as usize] + 1 + random.below(most / 2);
            proxy.arm(way, At::Byte(at), What::Flip(random.below(8) as u8));
        }
        trains(&remote, &format!("seed {seed}"));
        let (counts, stats) = (proxy.counts(), remote.stats());
        assert!(counts.flips >= seen.flips + 3, "seed {seed}: {} flips", counts.flips - seen.flips);
        assert!(stats.resumed + stats.replayed >= 1, "seed {seed}: each flip costs a connection: {stats:?}");
        proxy.disarm();
    }
}

#[test]
fn random_streams_through_cuts_give_the_same_reads() {
    let (_server, proxy) = pair();
    for seed in 0..20 {
        let mut random = Random(seed);
        let remote = open(&proxy.url(""), PATIENCE).unwrap();
        let seen = proxy.counts();
        for _ in 0..4 {
            let way = if random.one_in(2) { Way::Up } else { Way::Down };
            proxy.arm(way, At::Byte(seen.bytes[way as usize] + 1 + random.below(3000)), What::Cut);
        }
        let want = stream(&Cpu::start(), seed, 80);
        assert_eq!(stream(&*remote, seed, 80), want, "seed {seed}");
        proxy.disarm();
    }
    assert!(proxy.counts().cuts >= 40, "{}", proxy.counts().cuts);
}

#[test]
fn back_within_the_lease_the_session_goes_on() {
    let (server, proxy) = pair();
    let remote = open(&proxy.url(""), PATIENCE).unwrap();
    trains(&remote, "before");
    proxy.refuse(true);
    proxy.cut_all();
    std::thread::sleep(Duration::from_millis(300));
    proxy.refuse(false);
    trains(&remote, "after");
    let stats = remote.stats();
    assert_eq!((stats.resumed, stats.replayed, server.sessions()), (1, 0, 1), "{stats:?}");
}

#[test]
fn back_after_the_lease_the_session_is_rebuilt() {
    let server = Serving::start(Options { lease: Duration::from_millis(200), ..Options::default() });
    let proxy = Proxy::start(server.address());
    let remote = open(&proxy.url(""), PATIENCE).unwrap();
    let device = program::handle(remote.clone());
    let x = kiln::Tensor::from_vec(vec![1.5f32, -2.0], [2], &device);
    let y = (&x * 3.0).exp();
    let want = y.to_vec::<f32>().unwrap();
    proxy.refuse(true);
    proxy.cut_all();
    assert!(server.until(Duration::from_secs(2), |s| s.sessions() == 0), "the lease has ended");
    proxy.refuse(false);
    // Old values, and new ones made of them.
    assert_eq!(y.to_vec::<f32>().unwrap(), want);
    assert_eq!((&y - &y).to_vec::<f32>().unwrap(), [0.0; 2]);
    let stats = remote.stats();
    assert_eq!((stats.replayed, server.sessions()), (1, 1), "{stats:?}");
    trains(&remote, "after");
}

#[test]
fn a_half_open_connection_is_noticed_within_three_heartbeats() {
    for way in [Way::Up, Way::Down] {
        let server = Serving::start(Options { heartbeat: BEAT, ..Options::default() });
        let proxy = Proxy::start(server.address());
        let remote = open(&proxy.url(""), PATIENCE).unwrap();
        proxy.arm(way, At::Byte(proxy.counts().bytes[way as usize] + 2000), What::Stall);
        let start = Instant::now();
        trains(&remote, "through a stall");
        let took = start.elapsed();
        assert!(took > 3 * BEAT && took < 3 * BEAT + Duration::from_secs(3), "{way:?}: {took:?}");
        assert!(proxy.counts().stalls == 1 && remote.stats().resumed >= 1);
        // The server takes one connection of a session at a time, whatever became of the old one.
        assert_eq!(server.sessions(), 1);
    }
}

#[test]
fn a_slow_connection_is_only_slow() {
    let (_server, proxy) = pair();
    let remote = open(&proxy.url(""), PATIENCE).unwrap();
    proxy.trickle(97, Duration::from_micros(100));
    trains(&remote, "trickle");
    assert_eq!((proxy.counts().connections, remote.stats().resumed), (1, 0));
}

#[test]
fn a_server_that_crashes_and_comes_back_is_rebuilt() {
    let server = Serving::start(Options::default());
    let port = server.address().port();
    let proxy = Proxy::start(server.address());
    let remote = open(&proxy.url(""), PATIENCE).unwrap();
    let (crash, crashed) = std::sync::mpsc::channel();
    let crash = std::sync::Mutex::new(crash);
    proxy.arm(
        Way::Up,
        At::Before(kind::CALL, 9),
        What::Call(Box::new(move || crash.lock().unwrap().send(()).unwrap())),
    );
    let supervisor = std::thread::spawn(move || {
        crashed.recv().unwrap();
        drop(server);
        Serving::start(Options { port, ..Options::default() })
    });
    trains(&remote, "through a crash");
    let server = supervisor.join().unwrap();
    let stats = remote.stats();
    assert_eq!((stats.replayed, server.sessions()), (1, 1), "{stats:?}");
}

#[test]
fn another_server_stands_in() {
    let (first, second) = (Serving::start(Options::default()), Serving::start(Options::default()));
    let remote = open(&format!("{},{}", first.url(), second.url()), PATIENCE).unwrap();
    let device = program::handle(remote.clone());
    let x = kiln::Tensor::from_vec(vec![1.5f32, -2.0], [2], &device).exp();
    let want = x.to_vec::<f32>().unwrap();
    assert_eq!((first.sessions(), second.sessions()), (1, 0));
    let start = Instant::now();
    drop(first);
    assert_eq!(x.to_vec::<f32>().unwrap(), want);
    trains(&remote, "on the second");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!((remote.stats().replayed, second.sessions()), (1, 1));
}

/// A file with a token, as `kiln serve` leaves one.
fn token_file(token: &str) -> std::path::PathBuf {
    let path = std::env::temp_dir().join(format!("kiln-faults-{}-{token}", std::process::id()));
    std::fs::write(&path, format!("{token}\n")).unwrap();
    path
}

/// What `kiln serve` tells people to open.
fn pasted(url: String, token: &str) -> String {
    format!("{url}?token-file={}", token_file(token).display())
}

fn guarded(token: &str) -> Serving {
    Serving::start(Options { token: Some(token.into()), ..Options::default() })
}

#[test]
fn another_server_stands_in_with_a_token_and_device_of_its_own() {
    let (first, wrong, second) = (guarded("alpha"), guarded("beta"), guarded("gamma"));
    let urls = [
        pasted(first.url(), "alpha"),
        pasted(wrong.url(), "no-beta"),
        pasted(format!("{}/reference", second.url()), "gamma"),
    ];
    let remote = open(&urls.join(","), PATIENCE).unwrap();
    let device = program::handle(remote.clone());
    let x = kiln::Tensor::from_vec(vec![1.5f32, -2.0], [2], &device) * 3.0;
    assert_eq!(x.to_vec::<f32>().unwrap(), [4.5, -6.0]);
    assert_eq!((first.sessions(), wrong.sessions(), second.sessions()), (1, 0, 0));
    let (lost, stands) = (first.url(), second.url());
    drop(first);
    assert_eq!(x.to_vec::<f32>().unwrap(), [4.5, -6.0]);
    assert_eq!((remote.stats().replayed, wrong.sessions(), second.sessions()), (1, 0, 1));
    assert!(kiln_device::Driver::info(&*remote).name.contains("reference"));
    let events = remote.events();
    let told = |start: &str, word: &str| events.iter().any(|e| e.starts_with(start) && e.contains(word));
    assert!(told(&lost, "is lost") && told(&stands, "stands in for"), "{events:?}");
}

#[test]
fn a_wrong_token_at_one_server_does_not_keep_the_client_from_the_others() {
    let (first, wrong) = (guarded("alpha"), guarded("beta"));
    let proxy = Proxy::start(first.address());
    // Nothing is kept for recovery: only the session itself will do.
    let home = pasted(proxy.url(""), "alpha") + "&recover=0";
    let remote = open(&format!("{home},{}", pasted(wrong.url(), "no-beta")), PATIENCE).unwrap();
    let device = program::handle(remote.clone());
    let x = kiln::Tensor::from_vec(vec![1.5f32, -2.0], [2], &device) * 3.0;
    device.sync().unwrap();
    proxy.refuse(true);
    proxy.cut_all();
    let asked = |s: &Serving| s.log().iter().any(|line| line.contains("Refused"));
    assert!(wrong.until(PATIENCE, asked), "the other server was asked: {:?}", wrong.log());
    proxy.refuse(false);
    assert_eq!(x.to_vec::<f32>().unwrap(), [4.5, -6.0]);
    let stats = remote.stats();
    assert_eq!((stats.resumed, stats.replayed, first.sessions()), (1, 0, 1), "{stats:?}");
    let events = remote.events();
    assert!(events.iter().any(|e| e.contains("is back")), "{events:?}");
}

#[test]
fn what_every_server_refuses_is_told_with_every_reason() {
    let (first, second) = (guarded("alpha"), guarded("beta"));
    let refused = |url: &str| match open(url, PATIENCE).map(drop) {
        Err(kiln::Error::Refused { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let reason = refused(&format!("{},{}", pasted(first.url(), "wrong"), second.url()));
    let parts = [first.url(), "the token is wrong; ".into(), second.url(), "none was given".into()];
    assert!(parts.iter().all(|part| reason.contains(part.as_str())), "{reason}");
    let reason = refused(&first.url());
    assert!(reason.contains("?token-file=FILE") && reason.contains("KILN_TOKEN"), "{reason}");
    // A file that is not there is told at once, not when the server is needed.
    let missing = format!("{},{}?token-file=/no/such", pasted(first.url(), "alpha"), second.url());
    assert!(matches!(open(&missing, PATIENCE).map(drop), Err(kiln::Error::File { .. })));
    assert_eq!((first.sessions(), second.sessions()), (0, 0));
}
