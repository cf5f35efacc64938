//! The streams of threads that draw without a generator of their own. One test, because the seed is the process's.

use kiln_tensor::{Device, Generator, Tensor, seed, with_generator};

fn draw() -> Vec<f32> {
    Tensor::rand([64], &Device::cpu()).to_vec::<f32>().unwrap()
}

fn elsewhere() -> Vec<f32> {
    std::thread::spawn(draw).join().unwrap()
}

#[test]
fn every_thread_has_a_stream_of_its_own_and_the_seeding_one_that_of_the_seed() {
    let of_seed = |seed| with_generator(Generator::new(seed), draw);
    assert_eq!(elsewhere(), of_seed(0), "without a seed the first that draws has the stream of seed 0");
    let unseeded = [draw(), elsewhere()];
    assert!(unseeded[0] != unseeded[1] && !unseeded.contains(&of_seed(0)));
    let all = || {
        seed(7);
        [elsewhere(), draw(), elsewhere(), draw()]
    };
    let [a, own, b, next] = all();
    assert_eq!(own, of_seed(7));
    assert!(a != own && b != own && a != b && next != own && next != a && next != b);
    assert_eq!(all(), [a, own, b, next], "the order of first draws decides");
}
