//! Ranks and gradients over two real servers, of which one is killed in the middle, or both.

mod common;
use common::{Server, Training, kiln, said, until};
use kiln::dist::{Collective, Config, Group, Reduce};
use kiln::prelude::*;
use std::sync::Barrier;

const STEPS: &str = "400";

#[test]
fn gradients_over_two_servers_survive_the_loss_of_one_and_of_both() {
    let train = ["train", "digits", "--digest", "--json", "--shards", "2", "--steps", STEPS];
    let want = said(kiln(&train).args(["--workers", "2"])).digest();
    // Tensors go from server to server where those may, and through the client where they may not.
    let direct = ["--listen", "127.0.0.1:0", "--allow-peer", "127.0.0.1"];
    for (victims, args) in
        [(&[1][..], &direct[..2]), (&[1], &direct), (&[0, 1], &direct[..2]), (&[0, 1], &direct)]
    {
        let mut servers = [Server::start(args), Server::start(args)];
        let mut command = kiln(&train);
        for server in &servers {
            command.args(["--device", server.url()]);
        }
        let mut training = Training::start(&mut command);
        training.reaches(100);
        // None is back before all are gone.
        victims.iter().for_each(|&victim| servers[victim].end());
        assert!(training.is_running());
        victims.iter().for_each(|&victim| servers[victim].replace());
        assert_eq!(training.digest(), want, "killed: {victims:?}, {args:?}");
        for (at, server) in servers.iter().enumerate() {
            // Who was killed has seen the session being made again; who was not has kept it.
            until("a session", || server.times("\"opened\"") > 0);
            assert_eq!(server.times("\"opened\""), 1, "server {at}, killed: {victims:?}");
        }
    }
}

/// All collectives between two ranks, forwards and backwards. `middle` is called between the start of each and the
/// wait for it.
fn program(group: &Group, device: &Device, middle: impl Fn(usize)) -> Vec<Vec<f32>> {
    let rank = group.rank() as f64;
    let x =
        (Tensor::arange(0, 600, 1, device).to_dtype(DType::F32) * (0.01 + 0.003 * rank)).reshape([4, 150]);
    let x = x.requires_grad();
    let y = (&x * 0.7).sin();
    let mut values = Vec::new();
    let mut total = Tensor::zeros([], device);
    for turn in 0..4 {
        let handle = match turn {
            0 => y.all_reduce(group, Reduce::Sum),
            1 => y.all_gather(group),
            2 => y.reduce_scatter(group, Reduce::Mean),
            _ => y.broadcast(group, 1),
        };
        let handle = handle.unwrap();
        middle(turn);
        let value = handle.wait().unwrap();
        total = total + (&value * &value).sum(());
        values.push(value);
    }
    let gradient = total.backward();
    let mut read: Vec<Vec<f32>> = values.iter().map(|value| value.to_vec().unwrap()).collect();
    read.push(gradient.get(&x).unwrap().to_vec().unwrap());
    read
}

/// The program on one device per rank.
fn ranks(devices: &[Device; 2], middle: impl Fn(usize, usize) + Sync) -> Vec<Vec<Vec<f32>>> {
    let groups = Group::local(2, Config::default()).unwrap();
    std::thread::scope(|scope| {
        let (groups, middle) = (&groups, &middle);
        let rank = |rank: usize| {
            let device = &devices[rank];
            scope.spawn(move || program(&groups[rank], device, |turn| middle(rank, turn)))
        };
        let threads = [rank(0), rank(1)];
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn collectives_of_tensors_on_two_servers_survive_the_loss_of_one_and_of_both() {
    let local = [Device::open("cpu:0").unwrap(), Device::open("cpu:1").unwrap()];
    let want = ranks(&local, |_, _| {});
    assert_ne!(want[0][4], want[1][4]);
    for victims in [&[][..], &[1], &[0, 1]] {
        let servers = [Server::new(), Server::new()];
        let token = common::Folder::new("servers");
        let token = token.0.join("token");
        std::fs::write(&token, "proofs").unwrap();
        let url = |server: &Server| format!("kiln://{}?token-file={}", server.place(), token.display());
        let devices = servers.each_ref().map(|server| Device::open(&url(server)).unwrap());
        let servers = std::sync::Mutex::new(servers);
        let meet = Barrier::new(2);
        let got = ranks(&devices, |rank, turn| {
            if turn != 2 {
                return;
            }
            // Both have started a collective, and neither has its result.
            meet.wait();
            if rank == 0 {
                let mut servers = servers.lock().unwrap();
                victims.iter().for_each(|&victim| servers[victim].end());
                victims.iter().for_each(|&victim| servers[victim].replace());
            }
            meet.wait();
        });
        assert!(got == want, "killed: {victims:?}");
        let servers = servers.lock().unwrap();
        until("two sessions", || servers.iter().all(|server| server.times("\"opened\"") == 1));
    }
}
